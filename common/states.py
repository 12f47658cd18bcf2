"""Model states by name of array: some of them hold no array in memory until it is asked for."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import IO, Any

import numpy as np

State = Mapping[str, np.ndarray]
Shapes = dict[str, tuple[int, ...]]

SPOOL_ABOVE = 16 << 20  # bytes of a frame's body from which the server keeps it on disk


class LazyState(Mapping[str, np.ndarray]):
    """A state that makes an array, such as a mean or a piece of a file, each time it is asked for."""

    def __init__(self, shapes: Shapes, make: Callable[[str], np.ndarray]) -> None:
        self.shapes, self._make = shapes, make

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self.shapes:
            raise KeyError(name)
        return self._make(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)

    def __contains__(self, name: object) -> bool:
        return name in self.shapes


def shapes_of(state: Mapping[str, Any]) -> Shapes:
    """The shape of each array, without making any."""
    if isinstance(state, LazyState):
        return state.shapes
    return {name: tuple(value.shape) for name, value in state.items()}


def differences(found: Shapes, wanted: Shapes) -> list[str]:
    """What is wrong with `found`, array by array; empty if names and shapes are the same."""
    wrong = [f"{name} is missing" for name in wanted if name not in found]
    wrong += [f"{name} is not part of this model" for name in found if name not in wanted]
    return wrong + [
        f"{name} has shape {found[name]} instead of {shape}"
        for name, shape in wanted.items()
        if name in found and found[name] != shape
    ]


@dataclass(frozen=True)
class Place:
    """Where an array lies in the body of a frame."""

    dtype: str
    shape: tuple[int, ...]
    count: int
    start: int


@dataclass(frozen=True)
class Spool:
    """Where large bodies go while they arrive: files without a name, gone as soon as nobody reads them any more."""

    folder: Path | None = None
    above: int = SPOOL_ABOVE

    def open(self) -> IO[bytes]:
        """A new file; writing goes on to the disk, not into this process's memory."""
        return tempfile.TemporaryFile(dir=self.folder)


def spooled(file: IO[bytes], places: Mapping[str, Place]) -> LazyState:
    """The arrays of a body that lies in a file, read one at a time."""

    def read(name: str) -> np.ndarray:
        place = places[name]
        found = np.empty(place.count, place.dtype)
        rest, at = found.view(np.uint8).data, place.start
        while rest:
            got = os.preadv(file.fileno(), [rest], at)
            if got == 0:
                raise OSError(f"the file behind array {name!r} is shorter than it was")
            rest, at = rest[got:], at + got
        found.flags.writeable = False
        return found.reshape(place.shape)

    return LazyState({name: place.shape for name, place in places.items()}, read)


def private_names(names: Iterable[str], patterns: Iterable[str]) -> frozenset[str]:
    """The names that any of the patterns (`*LayerNorm*`) matches."""
    chosen = tuple(patterns)
    return frozenset(name for name in names if any(fnmatchcase(name, pattern) for pattern in chosen))
