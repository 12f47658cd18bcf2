"""Similarity of the sites' updates: inner products over whole models, and what follows from them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from fedstill.common.states import BLOCK

Square = NDArray[np.float64]


def inner_products(updates: Iterable[Sequence[np.ndarray]]) -> Square:
    """<Delta_i, Delta_j> of all sites, one array at a time."""
    total: Square | None = None
    for arrays in updates:
        flat = [array.reshape(-1) for array in arrays]
        if total is None:
            total = np.zeros((len(flat), len(flat)))
        for start in range(0, flat[0].size, BLOCK // len(flat) + 1):
            part = np.stack([array[start : start + BLOCK // len(flat) + 1] for array in flat]).astype(np.float64)
            total += part @ part.T
    if total is None:
        raise ValueError("there is no array to compare the sites by")
    return total


def mean_length(products: Square) -> float:
    """The mean of |Delta_i|."""
    return float(np.sqrt(np.diag(products)).mean())


def length_if_unrelated(products: Square, weights: NDArray[np.float64]) -> float:
    """|sum_i w_i Delta_i| as it would be with all updates at right angles."""
    return float(np.sqrt(weights**2 @ np.diag(products)))


def cosines(products: Square) -> Square:
    """cos(Delta_i, Delta_j); an update of length 0 is similar only to itself."""
    norms = np.sqrt(np.diag(products))
    lengths = np.outer(norms, norms)
    cosine = np.divide(products, lengths, out=np.zeros_like(products), where=lengths > 0)
    np.fill_diagonal(cosine, 1.0)
    return np.asarray(np.clip(cosine, -1.0, 1.0))


def should_split(products: Square, weights: NDArray[np.float64], eps1: float, eps2: float) -> bool:
    """Clustered FL: the mean update has converged (below eps1) while some site's is still large (above eps2)."""
    mean, largest = float(weights @ products @ weights), float(np.diag(products).max())  # squared
    return len(products) > 2 and mean < eps1**2 and largest > eps2**2


def halves(similarity: Square) -> NDArray[np.int64]:
    """Split into two clusters (0 and 1) by complete linkage; 0 holds the first site."""
    from sklearn.cluster import AgglomerativeClustering

    labels = AgglomerativeClustering(2, metric="precomputed", linkage="complete").fit_predict(1.0 - similarity)
    return np.asarray(labels != labels[0], np.int64)


def attention(similarity: Square) -> Square:
    """a_n = max(cos(Delta_n, Delta_i), 0), each row normalised to sum to 1 (SPFL as read here)."""
    positive = np.maximum(similarity, 0.0)
    return np.asarray(positive / positive.sum(axis=1, keepdims=True))


def moved(state: np.ndarray, updates: Mapping[str, np.ndarray], weights: Mapping[str, float]) -> np.ndarray:
    """w + sum_i a_i Delta_i."""
    total = state.astype(np.float64)
    for site, weight in weights.items():
        total += np.multiply(weight, updates[site], dtype=np.float64)
    return total.astype(state.dtype)
