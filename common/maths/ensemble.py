"""Combining the sites' predictions and states: weights that sum to one, means, sharpening."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedstill.common.states import LazyState, State, blocks_of, shapes_of

Matrix = NDArray[Any]  # float32, or float64 where models use it


def by_size(sizes: Mapping[str, int]) -> dict[str, float]:
    """w_k = n_k / sum of n over the sites that answered (FedID eq. 6)."""
    total = sum(sizes.values())
    if total <= 0:
        raise ValueError(f"the sites that answered hold no texts at all: {dict(sizes)}")
    return {name: size / total for name, size in sizes.items()}


def uniform(names: Sequence[str]) -> dict[str, float]:
    """The same weight for every site that answered."""
    return {name: 1.0 / len(names) for name in names}


def precision_of(*arrays: NDArray[Any]) -> type[np.floating[Any]]:
    """float64 if one of the arrays has it, else float32."""
    return np.float64 if any(array.dtype == np.float64 for array in arrays) else np.float32


def softmax(logits: Matrix, temperature: float = 1.0) -> Matrix:
    """Probabilities of each row."""
    scaled = logits.astype(np.float64) / temperature
    scaled -= scaled.max(axis=-1, keepdims=True)
    powers = np.exp(scaled)
    return np.asarray(powers / powers.sum(axis=-1, keepdims=True), precision_of(logits))


def by_class(counts: Mapping[str, NDArray[np.int64]]) -> dict[str, NDArray[np.float64]]:
    """w_kc = n_kc / sum_k n_kc over the sites that answered (FedKD); equal shares for a class that none holds."""
    total = np.sum(list(counts.values()), axis=0)
    return {name: np.where(total > 0, held / np.maximum(total, 1), 1.0 / len(counts)) for name, held in counts.items()}


def mean_predictions(
    predictions: Mapping[str, Matrix], weights: Mapping[str, float] | Mapping[str, NDArray[np.float64]]
) -> Matrix:
    """z = sum_k w_k z_k, in the order of `weights`, not of arrival (eq. 10); C weights per site apply by class."""
    total = sum(weights[name] * predictions[name].astype(np.float64) for name in weights)
    return np.asarray(total, dtype=precision_of(*predictions.values()))


def entropy_reduction(mean: Matrix, temperature: float = 0.1) -> Matrix:
    """DS-FL's sharpening of the mean prediction: softmax(mean / T), T below one lowers its entropy."""
    return softmax(mean, temperature)


def mean_arrays(states: Mapping[str, State], weights: Mapping[str, float]) -> LazyState:
    """theta = sum_k w_k theta_k (FedID eq. 3), each array computed on access, in the order of `weights`.

    Integer arrays such as counters come from the first site.
    """
    shapes = shapes_of(states[next(iter(weights))])

    def mean(name: str) -> np.ndarray:
        parts = [blocks_of(states[site], name) for site in weights]
        return _joined(_means(list(weights.values()), parts), shapes[name])

    return LazyState(shapes, mean)


def _means(weights: list[float], parts: Sequence[Iterator[np.ndarray]]) -> Iterator[np.ndarray]:
    """Yield the weighted means of blocks; of all sites' blocks only one is in memory at a time."""
    first, *others = parts
    for block in first:
        if block.dtype.kind != "f":
            yield block
            continue
        total, product = np.zeros(block.shape, np.float64), np.empty(block.shape, np.float64)
        total += np.multiply(weights[0], block, out=product, dtype=np.float64)
        for weight, part in zip(weights[1:], others, strict=True):
            # in float64, so that the mean of equal numbers is that number
            total += np.multiply(weight, next(part), out=product, dtype=np.float64)
        yield total.astype(block.dtype)


def _joined(blocks: Iterable[np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
    joined: np.ndarray | None = None
    at = 0
    for block in blocks:
        if joined is None:
            joined = np.empty(math.prod(shape), block.dtype)
        joined[at : at + block.size] = block
        at += block.size
    return np.zeros(shape, np.float32) if joined is None else joined.reshape(shape)
