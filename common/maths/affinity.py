"""ATC's formulas: how near sites are by their updates, and what follows (Dong et al. 2023, eqs. 2 to 4)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedstill.common.maths.ensemble import by_size
from fedstill.common.maths.similarity import cosines, inner_products

State = Mapping[str, NDArray[Any]]
Similarities = NDArray[np.float64]


def update_cosines(updates: Mapping[str, State]) -> Similarities:
    """Return cos(Delta_n, Delta_i) of every two updates, each taken as one long vector."""
    names = list(next(iter(updates.values()), {}))
    return cosines(inner_products([update[name] for update in updates.values()] for name in names))


def cluster(similarities: Similarities, clusters: int) -> list[int]:
    """Cluster agglomeratively on cosine distance with average linkage; return each site's cluster number."""
    from sklearn.cluster import AgglomerativeClustering

    count = len(similarities)
    if count <= clusters:
        return list(range(count))
    model = AgglomerativeClustering(n_clusters=clusters, metric="precomputed", linkage="average")
    labels = model.fit_predict(1.0 - similarities).tolist()
    order = list(dict.fromkeys(labels))  # numbered by first appearance, so that two runs can be compared
    return [order.index(label) for label in labels]


def ranking(similarities: Similarities, number: int) -> list[int]:
    """Return all others, the nearest first; ties in the run's order."""
    others = [other for other in range(len(similarities)) if other != number]
    return sorted(others, key=lambda other: -similarities[number, other])


def step_towards(own: State, updates: Mapping[str, State], sizes: Mapping[str, int]) -> dict[str, NDArray[Any]]:
    """w_n + sum_i (n_i / sum_j n_j) Delta_i over the given updates (eqs. 2 and 4); other arrays of w_n stay."""
    shares = by_size(sizes)
    moved = {name for update in updates.values() for name in update}
    state = dict(own)
    for name in moved:
        total = sum(np.float64(shares[node]) * updates[node][name].astype(np.float64) for node in updates)
        state[name] = np.asarray(own[name] + total, np.float32)
    return state


def positives_and_negatives(
    h: Mapping[str, NDArray[np.float32]], nearest: Mapping[str, Sequence[str]], neighbours: Mapping[str, int]
) -> dict[str, dict[str, NDArray[np.float16]]]:
    """Return each site's mean h of its so many nearest (C+), and every other h (C-); skip sites with an empty set."""
    contrasts = {}
    for site in h:
        others = [other for other in nearest.get(site, []) if other in h]
        near, far = others[: neighbours[site]], others[neighbours[site] :]
        if near and far:  # without negatives, eq. 3 is 0
            contrasts[site] = {
                "positive": np.mean([h[other] for other in near], axis=0).astype(np.float16),
                "negatives": np.stack([h[other] for other in far]).astype(np.float16),
            }
    return contrasts


def contrastive_loss(own: Tensor, positive: Tensor, negatives: Tensor, temperature: float) -> Tensor:
    """Eq. 3, mean over items: `own` and `positive` (the mean of C+) are items x width, `negatives` one such each."""
    near = torch.cosine_similarity(own, positive, dim=-1) / temperature
    far = torch.cosine_similarity(own.unsqueeze(0), negatives, dim=-1) / temperature
    logits = torch.cat([near.unsqueeze(0), far])
    return (torch.logsumexp(logits, dim=0) - near).mean()


def mixed_features(features: Sequence[NDArray[np.float16]], primary: NDArray[np.int64]) -> NDArray[np.float32]:
    """Mix item by item: half of the primary site's feature and equal parts of the others' (one site: its own)."""
    count = len(features)
    rest = 0.5 / (count - 1) if count > 1 else 0.0
    mixed = np.zeros(features[0].shape, np.float32)
    for number, feature in enumerate(features):
        weights = np.where(primary == number, 0.5 if count > 1 else 1.0, rest).astype(np.float32)
        mixed += weights[:, None, None] * feature.astype(np.float32)
    return mixed


def clipped(vectors: NDArray[np.float32], norm: float) -> NDArray[np.float32]:
    """Clip vectors along the last axis to that Euclidean norm."""
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return np.asarray(vectors * np.minimum(1.0, norm / np.maximum(lengths, 1e-12)), np.float32)
