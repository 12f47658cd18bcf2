"""Model states by array name; some load an array only on access."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

State = Mapping[str, np.ndarray]
Arrays = dict[str, np.ndarray]
Shapes = dict[str, tuple[int, ...]]

BLOCK = 1 << 20  # numbers processed at a time


class LazyState(Mapping[str, np.ndarray]):
    """A state that computes an array, such as a mean or a part of a file, on each access."""

    def __init__(self, shapes: Shapes, make: Callable[[str], np.ndarray]) -> None:
        self.shapes, self._make = shapes, make

    def blocks(self, name: str) -> Iterator[np.ndarray]:
        """Yield an array's numbers in order, BLOCK at a time."""
        return _blocks(self[name])

    def kinds(self) -> dict[str, str]:
        """Return the kind of number of each array, if known without computing it."""
        return {}

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
    """Yield an array's numbers in order, in blocks, so that no second array of full size is needed."""
    return state.blocks(name) if isinstance(state, LazyState) else _blocks(state[name])


def _blocks(value: np.ndarray) -> Iterator[np.ndarray]:
    flat = value.reshape(-1)
    return (flat[start : start + BLOCK] for start in range(0, flat.size, BLOCK))


def copied(state: State) -> dict[str, np.ndarray]:
    """Copy a state into one block of memory, which the system gets back whole."""
    sizes = {name: -(-value.nbytes // 64) * 64 for name, value in state.items()}  # align every array
    memory, copies, at = np.empty(sum(sizes.values()), np.uint8), {}, 0
    for name, value in state.items():
        copies[name] = memory[at : at + value.nbytes].view(value.dtype).reshape(value.shape)
        copies[name][...] = value
        at += sizes[name]
    return copies


def shapes_of(state: Mapping[str, Any]) -> Shapes:
    """Return the shape of each array, without computing any."""
    if isinstance(state, LazyState):
        return state.shapes
    return {name: tuple(value.shape) for name, value in state.items()}


def kinds_of(state: State) -> dict[str, str]:
    """Return whether each array has floats ("f") or integers ("i"), as far as known without computing any."""
    return state.kinds() if isinstance(state, LazyState) else {n: kind_of(value.dtype) for n, value in state.items()}


def kind_of(dtype: Any) -> str:
    """Return "f" for floats, "i" for integers."""
    return "f" if np.dtype(dtype).kind == "f" else "i"


def differences(found: Shapes, wanted: Shapes) -> list[str]:
    """List what is wrong with `found`, array by array; empty if names and shapes are the same."""
    wrong = [f"{name} is missing" for name in wanted if name not in found]
    wrong += [f"{name} is not part of this model" for name in found if name not in wanted]
    return wrong + [
        f"{name} has shape {found[name]} instead of {shape}"
        for name, shape in wanted.items()
        if name in found and found[name] != shape
    ]


def private_names(names: Iterable[str], patterns: Iterable[str]) -> frozenset[str]:
    """Return the names that match any of the patterns (`*LayerNorm*`)."""
    chosen = tuple(patterns)
    return frozenset(name for name in names if any(fnmatchcase(name, pattern) for pattern in chosen))
