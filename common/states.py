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

from fedstill.common.numbers import Recipe, restore

State = Mapping[str, np.ndarray]
Shapes = dict[str, tuple[int, ...]]

BLOCK = 1 << 20  # numbers that are worked on at a time
SPOOL_ABOVE = 16 << 20  # bytes of a frame's body from which the server keeps it on disk


class LazyState(Mapping[str, np.ndarray]):
    """A state that makes an array, such as a mean or a piece of a file, each time it is asked for."""

    def __init__(self, shapes: Shapes, make: Callable[[str], np.ndarray]) -> None:
        self.shapes, self._make = shapes, make

    def blocks(self, name: str) -> Iterator[np.ndarray]:
        """The numbers of an array in their order, BLOCK of them at a time."""
        return _blocks(self[name])

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


def blocks_of(state: State, name: str) -> Iterator[np.ndarray]:
    """The numbers of an array in their order, a block at a time, so that no second array of full size is needed."""
    return state.blocks(name) if isinstance(state, LazyState) else _blocks(state[name])


def _blocks(value: np.ndarray) -> Iterator[np.ndarray]:
    flat = value.reshape(-1)
    return (flat[start : start + BLOCK] for start in range(0, flat.size, BLOCK))


def copied(state: State) -> dict[str, np.ndarray]:
    """A copy in one piece of memory, which goes back to the system whole instead of leaving holes."""
    sizes = {name: -(-value.nbytes // 64) * 64 for name, value in state.items()}  # every array begins aligned
    memory, found, at = np.empty(sum(sizes.values()), np.uint8), {}, 0
    for name, value in state.items():
        found[name] = memory[at : at + value.nbytes].view(value.dtype).reshape(value.shape)
        found[name][...] = value
        at += sizes[name]
    return found


def shapes_of(state: Mapping[str, Any]) -> Shapes:
    """The shape of each array, without making any."""
    if isinstance(state, LazyState):
        return state.shapes
    return {name: tuple(value.shape) for name, value in state.items()}


def kinds_of(state: State) -> dict[str, str]:
    """Whether each array has fractions ("f") or whole numbers ("i"), as far as that is known without making any."""
    if isinstance(state, SpooledState):
        return {name: _kind(place.dtype) for name, place in state.places.items()}
    return {} if isinstance(state, LazyState) else {name: _kind(value.dtype) for name, value in state.items()}


def _kind(dtype: Any) -> str:
    return "f" if np.dtype(dtype).kind == "f" else "i"


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

    def blocks(self, name: str) -> Iterator[np.ndarray]:
        """The numbers of an array in their order; no more of it than a block is in memory."""
        place = self.places[name]
        if place.recipe:
            yield from _blocks(self[name])
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


def private_names(names: Iterable[str], patterns: Iterable[str]) -> frozenset[str]:
    """The names that any of the patterns (`*LayerNorm*`) matches."""
    chosen = tuple(patterns)
    return frozenset(name for name in names if any(fnmatchcase(name, pattern) for pattern in chosen))
