"""Combining the sites' predictions and states: weights that sum to one, means, sharpening."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from fedstill.common.states import LazyState, State, shapes_of

Matrix = NDArray[np.float32]
BLOCK = 1 << 20  # numbers that are worked on at a time, so that no second array of full size is made


def by_size(sizes: Mapping[str, int]) -> dict[str, float]:
    """w_k = n_k / sum of n over the sites that answered (FedID eq. 6)."""
    total = sum(sizes.values())
    if total <= 0:
        raise ValueError(f"the sites that answered hold no texts at all: {dict(sizes)}")
    return {name: size / total for name, size in sizes.items()}


def uniform(names: Sequence[str]) -> dict[str, float]:
    """The same weight for every site that answered."""
    return {name: 1.0 / len(names) for name in names}


def softmax(logits: Matrix, temperature: float = 1.0) -> Matrix:
    """Probabilities of each row."""
    scaled = logits.astype(np.float64) / temperature
    scaled -= scaled.max(axis=-1, keepdims=True)
    powers = np.exp(scaled)
    return np.asarray(powers / powers.sum(axis=-1, keepdims=True), np.float32)


def by_class(counts: Mapping[str, NDArray[np.int64]]) -> dict[str, NDArray[np.float64]]:
    """w_kc = n_kc / sum_k n_kc over who answered (FedKD); equal shares of a class that none of them holds."""
    total = np.sum(list(counts.values()), axis=0)
    return {name: np.where(total > 0, held / np.maximum(total, 1), 1.0 / len(counts)) for name, held in counts.items()}


def mean_predictions(
    predictions: Mapping[str, Matrix], weights: Mapping[str, float] | Mapping[str, NDArray[np.float64]]
) -> Matrix:
    """z = sum_k w_k z_k, in the order of `weights`, not of arrival (eq. 10); C weights a site count class by class."""
    total = sum(weights[name] * predictions[name].astype(np.float64) for name in weights)
    return np.asarray(total, dtype=np.float32)


def entropy_reduction(mean: Matrix, temperature: float = 0.1) -> Matrix:
    """DS-FL's sharpening of the mean prediction: softmax(mean / T), T below one lowers its entropy."""
    return softmax(mean, temperature)


def mean_arrays(states: Mapping[str, State], weights: Mapping[str, float]) -> LazyState:
    """theta = sum_k w_k theta_k (FedID eq. 3), each array made when asked for, in the order of `weights`.

    Whole numbers such as counters come from the first.
    """
    shapes = shapes_of(states[next(iter(weights))])
    return LazyState(shapes, lambda name: _mean((weights[site], states[site][name]) for site in weights))


def _mean(parts: Iterable[tuple[float, np.ndarray]]) -> np.ndarray:
    total: NDArray[np.float64] | None = None
    for weight, value in parts:
        if value.dtype.kind != "f":
            return value
        if total is None:
            total, like = np.zeros(value.size, np.float64), value.dtype
        flat = value.reshape(-1)
        for start in range(0, flat.size, BLOCK):
            total[start : start + BLOCK] += weight * flat[start : start + BLOCK]
    assert total is not None
    return total.astype(like).reshape(value.shape)
