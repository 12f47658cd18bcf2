"""Large bodies on disk while they arrive: a model's state never needs twice its size in memory."""

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

SPOOL_ABOVE = 16 << 20  # size in bytes from which the server keeps a frame's body on disk


@dataclass(frozen=True)
class Place:
    """Where an array lies in the body of a frame."""

    dtype: str  # of the stored numbers
    shape: tuple[int, ...]  # of the array
    count: int
    start: int
    recipe: Recipe = ()

    def made_of(self, values: np.ndarray) -> np.ndarray:
        """Return the array of the stored numbers, read-only."""
        array = (restore(values, self.recipe) if self.recipe else values).reshape(self.shape)
        array.flags.writeable = False
        return array

    def part(self, first: int, count: int) -> Place:
        """Return where `count` of its numbers lie, from number `first` on."""
        return Place(self.dtype, (count,), count, self.start + first * np.dtype(self.dtype).itemsize)


@dataclass(frozen=True)
class Spool:
    """Receives large bodies in unnamed files, which vanish when nobody reads them any more."""

    folder: Path | None = None
    above: int = SPOOL_ABOVE

    def open(self) -> IO[bytes]:
        """Open a new file; writes go to disk instead of this process's memory."""
        return tempfile.TemporaryFile(dir=self.folder)


class SpooledState(LazyState):
    """The arrays of a body in a file, read on access."""

    def __init__(self, file: IO[bytes], places: Mapping[str, Place]) -> None:
        # a function instead of a method: a cycle would keep the file until garbage collection
        super().__init__({n: place.shape for n, place in places.items()}, lambda n: _read(file, places[n]))
        self._file, self.places = file, places

    def kinds(self) -> dict[str, str]:
        """Return the kinds from the head of the frame."""
        return {name: kind_of(place.dtype) for name, place in self.places.items()}

    def blocks(self, name: str) -> Iterator[np.ndarray]:
        """Yield an array's numbers in order; only one block at a time is in memory."""
        place = self.places[name]
        if place.recipe:
            yield from super().blocks(name)
            return
        for start in range(0, place.count, BLOCK):
            yield _read(self._file, place.part(start, min(BLOCK, place.count - start)))


def _read(file: IO[bytes], place: Place) -> np.ndarray:
    values = np.empty(place.count, place.dtype)
    rest, at = values.view(np.uint8).data, place.start
    while rest:
        count = os.preadv(file.fileno(), [rest], at)
        if count == 0:
            raise OSError("a file with a site's answer is shorter than it was")
        rest, at = rest[count:], at + count
    return place.made_of(values)
