"""Noise on predictions and its accounting: numbers from formulas, from an independent library, and by hand."""

from __future__ import annotations

import math
import os
import warnings
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import kstest

from fedstill.client.release.budget import Budget, BudgetError
from fedstill.client.release.noise import standard_normal
from fedstill.client.release.privacy import Guard
from fedstill.common.checkpoint import write_atomically
from fedstill.common.config import ConfigError, PrivacyConfig
from fedstill.common.config.files import check
from fedstill.common.lock import only_one
from fedstill.common.maths.privacy import Use, epsilon_of, hide, multiplier_for
from fedstill.common.wire import WireError
from fedstill.strategies import VERBS

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
    found = epsilon_of({Use(multiplier): count}, 1e-5)
    assert exact(multiplier, count, 1e-5) <= found <= 1.2 * exact(multiplier, count, 1e-5)


@pytest.mark.parametrize(
    ("multiplier", "count", "renyi", "tight"),
    [(1.0, 1, 4.7285, 4.3772), (2.0, 10, 8.0794, 7.5113), (25.0, 640, 4.7933, 4.4377), (100.0, 1280, 1.4976, 1.3744)],
)
def test_epsilon_beside_that_of_dp_accounting(multiplier: float, count: int, renyi: float, tight: float) -> None:
    # dp-accounting 0.6.0, RdpAccountant and PLDAccountant, delta = 1e-5
    assert epsilon_of({Use(multiplier): count}, 1e-5) == pytest.approx(renyi, rel=0.01)
    assert exact(multiplier, count, 1e-5) == pytest.approx(tight, rel=1e-3)


def test_epsilon_by_a_plain_loop_over_orders() -> None:
    # Renyi: alpha / (2 z^2) each; then the least of rdp + log(1 - 1/a) - (log delta + log a) / (a - 1)
    orders = [1 + x / 10 for x in range(1, 600)]
    rdp = [10 * a / (2 * 2.0**2) + 5 * a / (2 * 4.0**2) for a in orders]
    by_hand = min(
        r + math.log1p(-1 / a) - (math.log(1e-5) + math.log(a)) / (a - 1) for r, a in zip(rdp, orders, strict=True)
    )
    assert epsilon_of({Use(2.0): 10, Use(4.0): 5}, 1e-5) == pytest.approx(by_hand, rel=0.01)


def test_nothing_spent_is_nothing_and_every_prediction_costs() -> None:
    assert epsilon_of({}, 1e-5) == 0
    assert epsilon_of({Use(1.0): 0}, 1e-5) == 0
    spent = [epsilon_of({Use(5.0): count}, 1e-5) for count in (1, 2, 10, 100)]
    assert spent == sorted(spent)
    assert spent[0] > 0


def test_the_noise_for_a_budget_keeps_it_and_no_much_smaller_one_does() -> None:
    found = multiplier_for(640, 8.0, 1e-5)
    assert epsilon_of({Use(found): 640}, 1e-5) <= 8.0
    assert epsilon_of({Use(found * 0.99): 640}, 1e-5) > 8.0


def test_vectors_are_centred_clipped_and_noised_with_the_promised_deviation() -> None:
    logits = np.array([[3.0, 1.0], [100.0, -100.0], [0.3, 0.1]], np.float32)
    still = hide(logits, 1.0, 1e-12, standard_normal)
    half = math.sqrt(0.5)  # (1, -1) and (100, -100) have norms above 1; (0.1, -0.1) stays
    assert np.allclose(still, [[half, -half], [half, -half], [0.1, -0.1]], atol=1e-6)
    many = np.zeros((20_000, 2), np.float32)
    assert hide(many, 2.0, 1.5, standard_normal).std() == pytest.approx(2 * 2.0 * 1.5, rel=0.02)


def test_noise_is_normal_and_never_the_same_again() -> None:
    many = standard_normal((200, 500))
    assert (many.mean(), many.std()) == (pytest.approx(0, abs=0.02), pytest.approx(1, abs=0.02))
    assert kstest(many.ravel(), "norm").pvalue > 1e-6
    np.random.seed(1)
    first = standard_normal((4,))
    np.random.seed(1)
    assert not np.array_equal(first, standard_normal((4,)))


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf, np.finfo(np.float32).max])
def test_numbers_that_are_not_finite_do_not_pass_through_the_noise(wrong: float) -> None:
    logits = np.array([[wrong, 1.0], [wrong, -wrong], [0.1, -0.1]], np.float32)
    hidden = hide(logits, 1.0, 2.0, standard_normal)
    assert np.isfinite(hidden).all()
    still = hide(logits, 1.0, 1e-12, standard_normal)
    assert (np.linalg.norm(still, axis=1) <= 1 + 1e-5).all()


def test_the_low_bits_of_a_noisy_number_tell_nothing() -> None:
    # the noise's deviation is 8, the grid 8 / 2^16: every number that leaves lies on it, whatever it hides
    for value in (0.0, 0.1, 0.3):
        hidden = hide(np.array([[value, -value]], np.float64), 1.0, 4.0, standard_normal)
        assert np.array_equal(hidden * 2.0**13, np.round(hidden * 2.0**13))


def spend(folder: str, times: int) -> int:
    """What one process of a site lets out."""
    guard = Guard(PrivacyConfig(epsilon=1e6, noise_multiplier=4.0), Path(folder))
    for _ in range(times):
        guard.charge(4, "predictions")
    return 4 * times


def test_processes_of_one_site_share_one_budget(tmp_path: Path) -> None:
    with ProcessPoolExecutor(4, get_context("spawn")) as pool:
        sent = sum(pool.map(spend, [str(tmp_path)] * 4, [25] * 4))
    assert sent == 400
    assert Budget(tmp_path, 1e6, 1e-5).uses() == {Use(4.0): 400}


def test_the_budget_is_read_and_written_under_a_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free: list[bool] = []
    look, write = Budget.uses, write_atomically

    def note() -> None:
        try:
            with only_one(tmp_path / "privacy.lock", BlockingIOError()):
                free.append(True)
        except BlockingIOError:
            free.append(False)

    monkeypatch.setattr(Budget, "uses", lambda self: (note(), look(self))[1])
    monkeypatch.setattr("fedstill.client.release.budget.write_atomically", lambda *all: (note(), write(*all))[1])
    Budget(tmp_path, 10.0, 1e-5).charge(Use(4.0), 3, "three")
    assert free == [False, False]


def test_the_budget_is_on_disk_before_anything_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(os.readlink(f"/proc/self/fd/{fd}")), real(fd))[1])
    budget = Budget(tmp_path, 10.0, 1e-5)
    budget.charge(Use(4.0), 3, "three")
    assert synced[-1] == str(tmp_path)  # the rename itself
    assert Path(synced[0]).name.startswith(".privacy.json")
    assert budget.uses() == {Use(4.0): 3}


def test_a_budget_that_cannot_be_read_is_no_new_budget(tmp_path: Path) -> None:
    (tmp_path / "privacy.json").write_text('{"uses": {"4.0"')
    with pytest.raises(BudgetError, match="nothing leaves this site uncounted"):
        Budget(tmp_path, 10.0, 1e-5).charge(Use(4.0), 1, "one")


def test_an_answer_that_hides_itself_leaves_only_if_it_has_paid(tmp_path: Path) -> None:
    guard, verb = Guard(PrivacyConfig(epsilon=1e6, noise_multiplier=4.0), tmp_path), VERBS["query.scores"]
    scored = verb.answer(items=np.arange(3), scores=np.ones(3), texts=8)  # type: ignore[call-arg]
    guard.admit(verb)
    with pytest.raises(WireError, match="has not paid for it"):
        guard.cover(verb, scored)
    guard.charge(1, "its scores")
    _, budget = guard.cover(verb, scored)
    assert budget is not None
    assert budget["predictions"] == 1
    guard.admit(verb)  # what one answer has paid lets no second one out
    with pytest.raises(WireError, match="has not paid for it"):
        guard.cover(verb, scored)


def test_sampled_steps_cost_less_than_whole_ones() -> None:
    # Opacus's own accountant, asked directly: 100 steps of noise multiplier 1.1 on samples of 2 %
    from opacus.accountants import RDPAccountant

    accountant = RDPAccountant()
    accountant.history = [(1.1, 0.02, 100)]
    assert epsilon_of({Use(1.1, 0.02): 100}, 1e-5) == pytest.approx(accountant.get_epsilon(1e-5), rel=0.02)
    assert epsilon_of({Use(1.1): 100}, 1e-5) > 20 * epsilon_of({Use(1.1, 0.02): 100}, 1e-5)


@pytest.mark.parametrize("wrong", [{"epsilon": 1.0}, {"epsilon": 1.0, "noise_multiplier": 1.0, "predictions": 5}])
def test_noise_or_the_number_of_predictions_is_named_not_both(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="either noise_multiplier, or predictions"):
        check(PrivacyConfig, wrong, "site.toml")


def test_no_noise_is_enough_for_a_budget_that_is_too_small() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ValueError, match="no noise makes"):
            multiplier_for(10**9, 1e-9, 1e-5)
