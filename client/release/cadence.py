"""When an answer leaves: how long the work took depends on the private texts, and the coordinator has a clock."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic, sleep


@contextmanager
def in_time(cadence: float) -> Iterator[None]:
    """End, however the work ends, a whole multiple of `cadence` seconds after the beginning."""
    began = monotonic()
    try:
        yield
    finally:
        sleep(-(monotonic() - began) % cadence)
