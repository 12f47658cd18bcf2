"""What the C library keeps of freed memory. Python cannot help it: a state's messages pass through many threads."""

from __future__ import annotations

import contextlib
import ctypes

_ARENA_MAX = -8  # of glibc's mallopt


def one_heap() -> None:
    """One heap for all threads: with one each, glibc holds on to a model's worth of freed messages for every few."""
    with contextlib.suppress(AttributeError, OSError):  # other C libraries have no such setting
        ctypes.CDLL(None).mallopt(_ARENA_MAX, 1)


def give_back() -> None:
    """Hand freed pages back to the system now."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
