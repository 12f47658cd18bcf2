"""Noise on predictions and its accounting: numbers from formulas, from an independent library, and by hand."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest

from fedstill.client.release.secret_noise import draws, secret_of
from fedstill.common.config import ConfigError, PrivacyConfig
from fedstill.common.config.files import check
from fedstill.common.maths.privacy import epsilon_of, hide, multiplier_for

pytestmark = pytest.mark.filterwarnings("ignore:Optimal order")


def exact(multiplier: float, count: int, delta: float) -> float:
    """Balle and Wang 2018: count uses of the Gaussian mechanism are one with noise multiplier / sqrt(count)."""
    mu = math.sqrt(count) / multiplier
    low, high = 0.0, 1e5

    def tail(x: float) -> float:
        return math.erfc(-x / math.sqrt(2)) / 2

    def spent(epsilon: float) -> float:
        second = tail(-mu / 2 - epsilon / mu)
        return tail(mu / 2 - epsilon / mu) - (math.exp(epsilon + math.log(second)) if second > 0 else 0.0)

    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if spent(middle) > delta else (low, middle)
    return high


@pytest.mark.parametrize(("multiplier", "count"), [(1.0, 1), (2.0, 10), (25.0, 640), (100.0, 1280), (0.5, 100)])
def test_epsilon_is_an_upper_bound_near_the_exact_one(multiplier: float, count: int) -> None:
    found = epsilon_of({multiplier: count}, 1e-5)
    assert exact(multiplier, count, 1e-5) <= found <= 1.2 * exact(multiplier, count, 1e-5)


@pytest.mark.parametrize(
    ("multiplier", "count", "renyi", "tight"),
    [(1.0, 1, 4.7285, 4.3772), (2.0, 10, 8.0794, 7.5113), (25.0, 640, 4.7933, 4.4377), (100.0, 1280, 1.4976, 1.3744)],
)
def test_epsilon_beside_that_of_dp_accounting(multiplier: float, count: int, renyi: float, tight: float) -> None:
    # dp-accounting 0.6.0, RdpAccountant and PLDAccountant, delta = 1e-5
    assert epsilon_of({multiplier: count}, 1e-5) == pytest.approx(renyi, rel=0.01)
    assert exact(multiplier, count, 1e-5) == pytest.approx(tight, rel=1e-3)


def test_epsilon_by_a_plain_loop_over_orders() -> None:
    # Renyi: alpha / (2 z^2) each; then the least of rdp + log(1 - 1/a) - (log delta + log a) / (a - 1)
    orders = [1 + x / 10 for x in range(1, 600)]
    rdp = [10 * a / (2 * 2.0**2) + 5 * a / (2 * 4.0**2) for a in orders]
    by_hand = min(
        r + math.log1p(-1 / a) - (math.log(1e-5) + math.log(a)) / (a - 1) for r, a in zip(rdp, orders, strict=True)
    )
    assert epsilon_of({2.0: 10, 4.0: 5}, 1e-5) == pytest.approx(by_hand, rel=0.01)


def test_nothing_spent_is_nothing_and_every_prediction_costs() -> None:
    assert epsilon_of({}, 1e-5) == 0
    assert epsilon_of({1.0: 0}, 1e-5) == 0
    spent = [epsilon_of({5.0: count}, 1e-5) for count in (1, 2, 10, 100)]
    assert spent == sorted(spent)
    assert spent[0] > 0


def test_the_noise_for_a_budget_keeps_it_and_no_much_smaller_one_does() -> None:
    found = multiplier_for(640, 8.0, 1e-5)
    assert epsilon_of({found: 640}, 1e-5) <= 8.0
    assert epsilon_of({found * 0.99: 640}, 1e-5) > 8.0


def test_vectors_are_centred_clipped_and_noised_with_the_promised_deviation() -> None:
    logits = np.array([[3.0, 1.0], [100.0, -100.0], [0.3, 0.1]], np.float32)
    still = hide(logits, 1.0, 1e-12, np.random.default_rng(1))
    half = math.sqrt(0.5)  # (1, -1) and (100, -100) have norms above 1; (0.1, -0.1) stays
    assert np.allclose(still, [[half, -half], [half, -half], [0.1, -0.1]], atol=1e-6)
    many = np.zeros((20_000, 2), np.float32)
    assert hide(many, 2.0, 1.5, np.random.default_rng(1)).std() == pytest.approx(2 * 2.0 * 1.5, rel=0.02)


def test_noise_is_the_same_again_only_for_the_same_numbers_at_the_same_place(tmp_path) -> None:  # type: ignore[no-untyped-def]
    secret = secret_of(tmp_path)
    assert secret_of(tmp_path) == secret
    assert (tmp_path / "secret").stat().st_mode & 0o077 == 0
    one = np.ones((2, 2), np.float32)
    first = draws(secret, one, "run", 1).standard_normal(4)
    assert np.array_equal(first, draws(secret, one, "run", 1).standard_normal(4))
    assert not np.array_equal(first, draws(secret, one + 1e-6, "run", 1).standard_normal(4))
    assert not np.array_equal(first, draws(secret, one, "run", 2).standard_normal(4))
    assert not np.array_equal(first, draws(secret_of(tmp_path / "other"), one, "run", 1).standard_normal(4))


@pytest.mark.parametrize("wrong", [{"epsilon": 1.0}, {"epsilon": 1.0, "noise_multiplier": 1.0, "predictions": 5}])
def test_noise_or_the_number_of_predictions_is_named_not_both(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="either noise_multiplier, or predictions"):
        check(PrivacyConfig, wrong, "site.toml")


def test_no_noise_is_enough_for_a_budget_that_is_too_small() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ValueError, match="no noise makes"):
            multiplier_for(10**9, 1e-9, 1e-5)
