"""The site: its Flower ClientApp, its model at work, its end of the stream."""
