"""Freed memory: what the C library keeps of it, and how long Python looks for it."""

from __future__ import annotations

import contextlib
import ctypes
import gc

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # of glibc's mallopt
_LARGE = 32 << 20  # bytes; glibc itself goes up to here


def one_heap() -> None:
    """Use one heap for all threads: with one each, glibc keeps a model's worth of freed messages for every few."""
    _set(_ARENA_MAX, 1)
    keep_pages()


def keep_pages() -> None:
    """Keep the pages of freed messages for the next ones: the system takes longer to clear new ones than to send them.

    glibc gets there by itself once a block of 32 MB was freed, and not before.
    """
    _set(_MMAP_THRESHOLD, _LARGE)
    _set(_TRIM_THRESHOLD, 2 * _LARGE)


def give_back() -> None:
    """Return freed pages to the system now."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def imports_stay() -> None:
    """Take what was imported so far out of Python's garbage collection: a full pass over torch's modules takes longer
    than an exchange. For the beginning of a process, before anything of a run is made."""
    gc.collect()
    gc.freeze()


def _set(what: int, value: int) -> None:
    with contextlib.suppress(AttributeError, OSError):  # other C libraries have no such settings
        ctypes.CDLL(None).mallopt(what, value)
