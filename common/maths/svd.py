"""Matrices sent as two thin factors that keep a share of their energy, where that saves numbers (FedKD)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

Arrays = dict[str, np.ndarray]
LEFT, RIGHT = "|left", "|right"  # no parameter has such a name


def energy_share(done: float, start: float, end: float) -> float:
    """tau(t): from `start` to `end` in proportion to the finished rounds."""
    return start + done * (end - start)


def rank_for(sigma: np.ndarray, share: float) -> int:
    """Return the fewest singular values whose squares make up `share` of the sum of all squares."""
    energy = np.cumsum(np.square(sigma, dtype=np.float64))
    if not energy.size or energy[-1] == 0:
        return 0
    return int(np.searchsorted(energy, share * energy[-1]) + 1)


def compress(arrays: Mapping[str, np.ndarray], share: float) -> Arrays:
    """Factor matrices into U sigma and V with `share` of the energy; whatever would grow, and the rest, stays as is."""
    packed: Arrays = {}
    for name, value in arrays.items():
        if value.ndim < 2 or value.dtype.kind != "f":
            packed[name] = value
            continue
        matrix = value.reshape(len(value), -1)
        u, sigma, v = np.linalg.svd(matrix, full_matrices=False)
        rank = rank_for(sigma, share)
        if rank * sum(matrix.shape) < matrix.size:
            packed[name + LEFT] = np.ascontiguousarray(u[:, :rank] * sigma[:rank])
            packed[name + RIGHT] = np.ascontiguousarray(v[:rank])
        else:
            packed[name] = value
    return packed


def recompose(arrays: Mapping[str, np.ndarray], like: Mapping[str, np.ndarray]) -> Arrays:
    """Rebuild the matrices, with the names and shapes of `like`."""
    return {
        name: arrays[name] if name in arrays else (arrays[name + LEFT] @ arrays[name + RIGHT]).reshape(value.shape)
        for name, value in like.items()
    }


def misfits(arrays: Mapping[str, np.ndarray], like: Mapping[str, np.ndarray]) -> list[str]:
    """List what is missing, left over or of a wrong shape, before it is multiplied."""
    wrong, known = [], set()
    for name, value in like.items():
        if name in arrays:
            known.add(name)
            right = arrays[name].shape == value.shape
        else:
            left, other = arrays.get(name + LEFT), arrays.get(name + RIGHT)
            known |= {name + LEFT, name + RIGHT}
            right = (
                left is not None
                and other is not None
                and value.ndim >= 2
                and left.ndim == other.ndim == 2
                and (left.shape[0], left.shape[1], other.shape[1]) == (len(value), len(other), value.size // len(value))
            )
        wrong += [] if right else [f"{name} is missing or does not make {value.shape}"]
    return wrong + [f"{name} is not part of the model" for name in arrays if name not in known]
