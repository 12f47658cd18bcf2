"""A federation on this machine: real processes, Flower's simulation, or one process."""
