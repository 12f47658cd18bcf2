"""Large bodies on disk while they arrive: a model's state never needs twice its size in memory."""

from __future__ import annotations

import os
import tempfile
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from fedstill.common.states import BLOCK, LazyState, kind_of
from fedstill.common.wire.compression import Recipe, restore

SPOOL_ABOVE = 16 << 20  # size in bytes from which the server keeps a frame's body on disk
KEPT = 8  # files that wait for their next body: what is in the page cache already is written five times as fast


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


class Spool:
    """Receives large bodies in unnamed files, which vanish with it."""

    def __init__(self, folder: Path | None = None, above: int = SPOOL_ABOVE) -> None:
        self.folder, self.above = folder, above
        self._free: deque[IO[bytes]] = deque(maxlen=KEPT)  # without a lock: bodies end in any thread, at any time

    def open(self) -> Body:
        """Open a file for a new body; writes go to disk instead of this process's memory."""
        try:
            file = self._free.pop()
        except IndexError:
            return self._watched(tempfile.TemporaryFile(dir=self.folder, buffering=0))
        file.seek(0)
        return self._watched(file)

    def _watched(self, file: IO[bytes]) -> Body:
        body = Body(file)
        weakref.finalize(body, self._free.append, file).atexit = False
        return body


class Body:
    """A file with a frame's body, which serves another one when nobody holds this any more."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def write(self, piece: bytes | memoryview) -> None:
        """Write the next bytes."""
        rest = memoryview(piece)
        while rest:
            rest = rest[os.write(self._file.fileno(), rest) :]

    def end(self, length: int) -> None:
        """Free what a longer body before this one took."""
        if os.fstat(self._file.fileno()).st_size > length:
            os.ftruncate(self._file.fileno(), length)

    def read(self, place: Place) -> np.ndarray:
        """Read one array, or a part of it."""
        values = np.empty(place.count, place.dtype)
        rest, at = values.view(np.uint8).data, place.start
        while rest:
            count = os.preadv(self._file.fileno(), [rest], at)
            if count == 0:
                raise OSError("a file with a site's answer is shorter than it was")
            rest, at = rest[count:], at + count
        return place.made_of(values)


class SpooledState(LazyState):
    """The arrays of a body in a file, read on access."""

    def __init__(self, body: Body, places: Mapping[str, Place]) -> None:
        # a function instead of a method: a cycle would keep the file until garbage collection
        super().__init__({n: place.shape for n, place in places.items()}, lambda n: body.read(places[n]))
        self._body, self.places = body, places

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
            yield self._body.read(place.part(start, min(BLOCK, place.count - start)))
