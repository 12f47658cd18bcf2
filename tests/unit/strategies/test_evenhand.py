"""Evenhand's parts: weights by blind texts, even training, labels in the central model's targets."""

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from fedstill.common.maths.weights import fitted_weights, log_shares
from fedstill.strategies.evenhand import Evenhand, EvenhandParams


def sure(labels: np.ndarray, right: float, rng: np.random.Generator, size: float = 2.0) -> np.ndarray:
    """Logits of a site that is right on a share of the texts."""
    said = np.where(rng.random(len(labels)) < right, labels, 1 - labels)
    return (size * np.eye(2)[said]).astype(np.float32)


def test_a_site_that_guesses_gets_no_weight_and_a_liar_none_either() -> None:
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, 400)
    logits = {"good": sure(labels, 0.85, rng), "guesses": sure(labels, 0.5, rng), "lies": sure(labels, 0.1, rng)}
    weights = fitted_weights(logits, labels, dict.fromkeys(logits, 1 / 3), ridge=0.01)
    assert weights["good"] > 0.5
    assert weights["guesses"] < 0.12
    assert weights["lies"] == 0.0


def test_the_weights_minimise_the_cost_as_written() -> None:
    rng = np.random.default_rng(1)
    labels = rng.integers(0, 3, 50)
    logits = {name: rng.normal(size=(50, 3)).astype(np.float32) for name in "abc"}
    start, ridge = {"a": 0.5, "b": 0.3, "c": 0.2}, 0.7
    z = torch.tensor(np.stack([logits[name] for name in start]), dtype=torch.float64)

    def cost(w: np.ndarray) -> float:
        mixed = torch.einsum("k,ktc->tc", torch.tensor(w), z)
        ce = torch.nn.functional.cross_entropy(mixed, torch.tensor(labels), reduction="sum")
        return float(ce) + ridge * 3 * float(((w - np.array([0.5, 0.3, 0.2])) ** 2).sum())

    found = np.array(list(fitted_weights(logits, labels, start, ridge).values()))
    free = minimize(
        cost, np.ones(3) / 3, bounds=[(0, None)] * 3, method="Powell", options={"xtol": 1e-9, "ftol": 1e-12}
    )
    assert cost(found) <= free.fun + 1e-6
    np.testing.assert_allclose(found, free.x, atol=1e-3)


def test_a_strong_ridge_leaves_size_weights() -> None:
    rng = np.random.default_rng(2)
    labels = rng.integers(0, 2, 40)
    logits = {"a": sure(labels, 0.9, rng), "b": sure(labels, 0.5, rng)}
    weights = fitted_weights(logits, labels, {"a": 0.2, "b": 0.8}, ridge=1e6)
    assert weights == pytest.approx({"a": 0.2, "b": 0.8}, abs=1e-3)


def test_shares_count_every_class_once_more_than_it_is_there() -> None:
    np.testing.assert_allclose(np.exp(log_shares(np.array([6, 0, 1]))), [0.7, 0.1, 0.2], rtol=1e-6)


def test_the_server_mixes_its_labels_into_the_targets_where_it_knows_them() -> None:
    class Central:
        blind, labels, classes = np.array([2, 0]), torch.tensor([1, 0]), 2

    class Fed:
        central = Central()

    y = np.full((3, 2), 0.5, np.float32)
    made = Evenhand(EvenhandParams(labels=0.5))
    np.testing.assert_allclose(made.with_labels(Fed(), y), [[0.75, 0.25], [0.5, 0.5], [0.25, 0.75]])
    assert Evenhand(EvenhandParams(labels=0.0)).with_labels(Fed(), y) is y


def test_what_is_taught_remembers_earlier_rounds_and_is_surer() -> None:
    z, made = np.array([[2.0, 0.0]], np.float32), Evenhand(EvenhandParams(memory=0.5, temperature=0.5))
    made.remembered = None
    np.testing.assert_allclose(made.taught(z), [[1 / (1 + np.exp(-4)), 1 / (1 + np.exp(4))]], rtol=1e-6)
    again = Evenhand(EvenhandParams(memory=0.5, temperature=0.5))
    again.load_state(made.state())
    for one in (made, again):  # a resumed run remembers the same
        np.testing.assert_allclose(one.taught(-z), [[0.5, 0.5]], rtol=1e-6)  # half of (2, 0) and half of (-2, 0)
