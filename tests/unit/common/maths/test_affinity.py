"""ATC's equations 2 to 4 on three clients, with numbers worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fedstill.common.maths.affinity import (
    clipped,
    cluster,
    contrastive_loss,
    mixed_features,
    ranking,
    step_towards,
    update_cosines,
)

# a and b pull alike (cosine 0.96), c against both (-1 and -0.96); each update lies in two arrays
UPDATES = {
    "a": {"x": np.float32([[3.0]]), "y": np.float32([4.0])},
    "b": {"x": np.float32([[4.0]]), "y": np.float32([3.0])},
    "c": {"x": np.float32([[-6.0]]), "y": np.float32([-8.0])},
}


def test_cosines_go_over_whole_updates_and_a_zero_update_is_like_itself_alone() -> None:
    assert update_cosines(UPDATES) == pytest.approx(np.array([[1, 0.96, -1], [0.96, 1, -0.96], [-1, -0.96, 1]]))
    still = {**UPDATES, "c": {"x": np.zeros((1, 1), np.float32), "y": np.zeros(1, np.float32)}}
    assert update_cosines(still)[2].tolist() == [0, 0, 1]


def test_clusters_are_by_average_linkage() -> None:
    assert cluster(update_cosines(UPDATES), 2) == [0, 0, 1]
    assert cluster(update_cosines(UPDATES), 5) == [0, 1, 2]
    # Distances 0-1 are 0.1, 1-2 0.3, 2-3 0.35, 0-2 0.9, 1-3 and 0-3 1. Single linkage would join 2 to {0, 1} at 0.3;
    # on average it is 0.6 away from them and 0.35 from 3.
    distances = np.array([[0, 0.1, 0.9, 1], [0.1, 0, 0.3, 1], [0.9, 0.3, 0, 0.35], [1, 1, 0.35, 0]])
    assert cluster(1 - distances, 2) == [0, 0, 1, 1]


def test_eq_2_adds_the_mean_update_of_the_cluster_by_size() -> None:
    own = {"x": np.float32([[10.0]]), "y": np.float32([20.0]), "still": np.float32([5.0])}
    members = {name: UPDATES[name] for name in ("a", "b")}
    found = step_towards(own, members, {"a": 10, "b": 30})
    # 10 + (10 * 3 + 30 * 4) / 40 = 13.75 and 20 + (10 * 4 + 30 * 3) / 40 = 23.25
    assert found["x"].tolist() == [[13.75]]
    assert found["y"].tolist() == [23.25]
    assert found["still"] is own["still"]


def test_eq_4_takes_the_nearest_itself_included() -> None:
    similarity = update_cosines(UPDATES)
    assert [ranking(similarity, n) for n in range(3)] == [[1, 2], [0, 2], [1, 0]]
    nearest = [2, *ranking(similarity, 2)[:1]]  # c with K = 2: itself and b
    updates = {name: UPDATES[name] for name in ("abc"[n] for n in nearest)}
    found = step_towards({"x": np.float32([[0.0]]), "y": np.float32([0.0])}, updates, {"c": 1, "b": 3})
    assert found["x"].tolist() == [[1.5]]  # (-6 + 3 * 4) / 4
    assert found["y"].tolist() == [0.25]  # (-8 + 3 * 3) / 4


def test_eq_3_by_hand() -> None:
    # Item 1: cos to the positive mean 1, to the negative 0. Item 2: 0.6 and -1, vectors of any length.
    own, positive = torch.tensor([[2.0, 0.0], [3.0, 4.0]]), torch.tensor([[5.0, 0.0], [7.0, 0.0]])
    negatives = torch.tensor([[[0.0, 1.0], [-6.0, -8.0]]])
    for tau in (1.0, 0.5):
        one = -math.log(math.exp(1 / tau) / (math.exp(1 / tau) + math.exp(0)))
        two = -math.log(math.exp(0.6 / tau) / (math.exp(0.6 / tau) + math.exp(-1 / tau)))
        assert float(contrastive_loss(own, positive, negatives, tau)) == pytest.approx((one + two) / 2, abs=1e-6)
    both = torch.cat([negatives, negatives])
    twice = -math.log(math.e / (math.e + 2))
    assert float(contrastive_loss(own[:1], positive[:1], both[:, :1], 1.0)) == pytest.approx(twice, abs=1e-6)


def test_a_synthetic_feature_is_half_of_one_site_and_equal_parts_of_the_rest() -> None:
    features = [np.full((2, 1, 1), value, np.float16) for value in (4, 8, 16)]
    found = mixed_features(features, np.array([0, 2]))
    assert found.ravel().tolist() == [0.5 * 4 + 0.25 * 8 + 0.25 * 16, 0.25 * 4 + 0.25 * 8 + 0.5 * 16]
    assert mixed_features(features[:1], np.array([0, 0])).ravel().tolist() == [4, 4]


def test_clipping_shortens_long_vectors_only() -> None:
    found = clipped(np.float32([[3, 4], [0.3, 0.4], [0, 0]]), 1.0)
    assert found == pytest.approx(np.array([[0.6, 0.8], [0.3, 0.4], [0, 0]]))
