"""Freed memory that the C library keeps. Python cannot release it: a state's messages pass through many threads."""

from __future__ import annotations

import contextlib
import ctypes

_ARENA_MAX = -8  # of glibc's mallopt


def one_heap() -> None:
    """Use one heap for all threads: with one each, glibc keeps a model's worth of freed messages for every few."""
    with contextlib.suppress(AttributeError, OSError):  # other C libraries have no such setting
        ctypes.CDLL(None).mallopt(_ARENA_MAX, 1)


def give_back() -> None:
    """Return freed pages to the system now."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
