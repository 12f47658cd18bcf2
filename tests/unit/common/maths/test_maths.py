"""Weights, ensembles and losses on numbers worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fedstill.common.maths.ensemble import (
    by_size,
    entropy_reduction,
    mean_arrays,
    mean_predictions,
    softmax,
    uniform,
)  # fmt: skip
from fedstill.common.maths.losses import LOSSES

LOG3 = math.log(3)


def test_weights_by_size_and_uniform_sum_to_one_over_who_is_there() -> None:
    assert by_size({"a": 10, "b": 30}) == {"a": 0.25, "b": 0.75}
    assert by_size({"b": 30}) == {"b": 1.0}
    assert uniform(["a", "b", "c", "d"])["c"] == 0.25
    with pytest.raises(ValueError, match="no texts at all"):
        by_size({"a": 0})


def test_softmax_of_log_odds() -> None:
    assert np.allclose(softmax(np.array([[0, LOG3]], np.float32)), [[0.25, 0.75]])
    assert np.allclose(softmax(np.array([[1e4, 0]], np.float32)), [[1, 0]])


def test_the_weighted_mean_of_predictions() -> None:
    z = {"a": np.array([[1.0, 3.0]], np.float32), "b": np.array([[5.0, -1.0]], np.float32)}
    assert np.array_equal(mean_predictions(z, {"a": 0.25, "b": 0.75}), np.array([[4.0, 0.0]], np.float32))


def test_entropy_reduction_sharpens() -> None:
    mean = np.array([[0.4, 0.6]], np.float32)
    expected = 1 / (1 + math.exp(-(0.6 - 0.4) / 0.1))  # two classes: the logistic of the gap over T
    assert entropy_reduction(mean, 0.1)[0, 1] == pytest.approx(expected, abs=1e-6)
    assert entropy_reduction(mean, 0.1)[0, 1] > 0.6


def test_the_mean_of_two_hand_made_states_leaves_counters_alone() -> None:
    states = {
        "a": {"w": np.array([1.0, 2.0], np.float32), "n": np.array(7)},
        "b": {"w": np.array([5.0, 10.0], np.float32), "n": np.array(9)},
    }
    mean = mean_arrays(states, {"a": 0.75, "b": 0.25})
    assert mean["w"].tolist() == [2.0, 4.0]
    assert mean["w"].dtype == np.float32
    assert mean["n"] == 7


def test_each_loss_by_hand() -> None:
    logits = torch.tensor([[0.0, LOG3]])  # p = 1/4, 3/4
    half = torch.tensor([[0.5, 0.5]])
    assert float(LOSSES["soft"](logits, half)) == pytest.approx(-0.5 * math.log(1 / 4) - 0.5 * math.log(3 / 4))
    assert float(LOSSES["kl"](logits, half)) == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(2 / 3))
    assert float(LOSSES["hard"](logits, torch.tensor([[0.1, 0.9]]))) == pytest.approx(-math.log(3 / 4))
    assert float(LOSSES["mse"](logits, torch.tensor([[1.0, LOG3]]))) == pytest.approx(0.5)
    assert float(LOSSES["l1"](logits, torch.tensor([[1.0, LOG3]]))) == pytest.approx(0.5)


def test_losses_are_means_over_texts() -> None:
    one, two = torch.randn(1, 3), torch.randn(1, 3)
    targets = torch.softmax(torch.randn(2, 3), dim=-1)
    for name, loss in LOSSES.items():
        both = float(loss(torch.cat([one, two]), targets))
        assert both == pytest.approx((float(loss(one, targets[:1])) + float(loss(two, targets[1:]))) / 2, rel=1e-5), (
            name
        )
