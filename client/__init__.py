"""The site: its Flower ClientApp, its model, its end of the stream."""
