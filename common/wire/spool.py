"""Large bodies on disk while they arrive: a model's state never has to fit into memory twice."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from fedstill.common.states import BLOCK, LazyState, kind_of
from fedstill.common.wire.compression import Recipe, restore

SPOOL_ABOVE = 16 << 20  # bytes of a frame's body from which the server keeps it on disk


@dataclass(frozen=True)
class Place:
    """Where an array lies in the body of a frame."""

    dtype: str  # of what lies there
    shape: tuple[int, ...]  # of the array
    count: int
    start: int
    recipe: Recipe = ()

    def made_of(self, found: np.ndarray) -> np.ndarray:
        """The array, of the numbers that lie there; nobody may write to it."""
        made = (restore(found, self.recipe) if self.recipe else found).reshape(self.shape)
        made.flags.writeable = False
        return made

    def part(self, first: int, count: int) -> Place:
        """Where `count` of its numbers lie, from number `first` on."""
        return Place(self.dtype, (count,), count, self.start + first * np.dtype(self.dtype).itemsize)


@dataclass(frozen=True)
class Spool:
    """Where large bodies go while they arrive: files without a name, gone as soon as nobody reads them any more."""

    folder: Path | None = None
    above: int = SPOOL_ABOVE

    def open(self) -> IO[bytes]:
        """A new file; writing goes on to the disk, not into this process's memory."""
        return tempfile.TemporaryFile(dir=self.folder)


class SpooledState(LazyState):
    """The arrays of a body that lies in a file, read when they are asked for."""

    def __init__(self, file: IO[bytes], places: Mapping[str, Place]) -> None:
        # a function, no method: with a cycle the file would stay until the garbage collector finds it
        super().__init__({n: place.shape for n, place in places.items()}, lambda n: _read(file, places[n]))
        self._file, self.places = file, places

    def kinds(self) -> dict[str, str]:
        """Known from the head of the frame."""
        return {name: kind_of(place.dtype) for name, place in self.places.items()}

    def blocks(self, name: str) -> Iterator[np.ndarray]:
        """The numbers of an array in their order; no more of it than a block is in memory."""
        place = self.places[name]
        if place.recipe:
            yield from super().blocks(name)
            return
        for start in range(0, place.count, BLOCK):
            yield _read(self._file, place.part(start, min(BLOCK, place.count - start)))


def _read(file: IO[bytes], place: Place) -> np.ndarray:
    found = np.empty(place.count, place.dtype)
    rest, at = found.view(np.uint8).data, place.start
    while rest:
        got = os.preadv(file.fileno(), [rest], at)
        if got == 0:
            raise OSError("a file with a site's answer is shorter than it was")
        rest, at = rest[got:], at + got
    return place.made_of(found)
