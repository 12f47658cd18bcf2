"""One process at a time: lock files that the system releases however their holder ends."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def taking_turns(path: Path) -> Iterator[None]:
    """Hold the lock file at `path`; wait while another process holds it."""
    with path.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def only_one(path: Path, busy: Exception) -> Iterator[None]:
    """Hold the lock file at `path`; raise `busy` if another process holds it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise busy from None
        yield
