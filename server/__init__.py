"""The coordinator: its Flower ServerApp, the central model, its end of the stream, the record of a run."""
