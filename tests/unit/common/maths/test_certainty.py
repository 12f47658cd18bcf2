"""FedAUX's scores against scikit-learn asked directly, and the size of its noise."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.optimize import minimize
from sklearn.linear_model import LogisticRegression

from fedstill.common.maths import certainty


@pytest.fixture
def features() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    own, other = rng.normal(1.0, 2.0, size=(30, 5)), rng.normal(-1.0, 2.0, size=(20, 5))
    return own.astype(np.float32), other.astype(np.float32), rng.normal(size=(7, 5)).astype(np.float32)


@pytest.mark.parametrize("per_text", [True, False])
def test_scores_are_scikit_learns_probability_of_being_own(features: tuple[np.ndarray, ...], per_text: bool) -> None:
    own, other, asked = features
    norm = max(np.linalg.norm(row) for row in [*own, *other])
    model = LogisticRegression(C=1 / (0.01 * (50 if per_text else 1)), max_iter=1000)
    model.fit(np.concatenate([own, other]) / norm, ["own"] * 30 + ["not own"] * 20)
    wanted = model.predict_proba(asked / norm)[:, list(model.classes_).index("own")] + 1e-8
    found = certainty.scores(certainty.fit(own, other, 0.01, per_text), asked)
    assert np.allclose(found, wanted, atol=1e-4)
    assert found.dtype == np.float32


def test_per_text_is_the_regulariser_beside_the_mean_loss(features: tuple[np.ndarray, ...]) -> None:
    own, other, _ = features
    found = certainty.fit(own, other, 0.01)
    x = np.concatenate([own, other]) / found.scale
    sign = np.repeat([1, -1], [30, 20])

    def objective(w: np.ndarray) -> float:
        return float(np.log1p(np.exp(-sign * (x @ w[:-1] + w[-1]))).mean() + 0.005 * w[:-1] @ w[:-1])

    wanted = minimize(objective, np.zeros(6)).x
    assert np.allclose(found.coefficients, wanted[:-1], atol=2e-2)


def test_noise_has_the_deviation_of_the_formula() -> None:
    deviation = certainty.gaussian_deviation(0.1, 1e-5)
    assert deviation**2 == pytest.approx(2 * math.log(125000) / 0.01)
    plain = certainty.Regression(np.zeros(20000), 0.0, 1.0)
    noisy = certainty.with_noise(plain, deviation, np.random.default_rng(0).standard_normal)
    assert np.std(noisy.coefficients) == pytest.approx(deviation, rel=0.05)
    assert noisy.intercept != 0


@pytest.mark.parametrize("per_text", [True, False])
def test_one_text_moves_a_bounded_regression_by_its_sensitivity_at_most(per_text: bool) -> None:
    rng = np.random.default_rng(0)
    bound = certainty.sensitivity(12, 0.5, per_text)
    farthest = 0.0
    for case in range(40):
        own, other = rng.normal(size=(8, 3)), rng.normal(size=(4, 3))
        changed = own.copy()
        changed[0] = -np.sign(own[1:].sum(axis=0)) * (10.0 if case % 2 else 1e-3)
        one, two = (certainty.fit_bounded(texts.astype(np.float32), other.astype(np.float32), 0.5, per_text)
                    for texts in (own, changed))  # fmt: skip
        moved = np.append(one.coefficients - two.coefficients, one.intercept - two.intercept)
        farthest = max(farthest, float(np.linalg.norm(moved)))
    assert 0.02 * bound < farthest <= bound


def test_the_papers_regression_is_moved_further_than_its_formula_says() -> None:
    # one text of a hundred times the others' norm sets the scale, and nothing holds the intercept
    rng = np.random.default_rng(1)
    own, other = rng.normal(1.0, 0.1, (80, 3)).astype(np.float32), rng.normal(-1.0, 0.1, (40, 3)).astype(np.float32)
    changed = own.copy()
    changed[0] *= 100
    one, two = certainty.fit(own, other, 0.5), certainty.fit(changed, other, 0.5)
    moved = np.append(one.coefficients - two.coefficients, one.intercept - two.intercept)
    assert np.linalg.norm(moved) > 5 * 2 / (120 * 0.5)


def test_bounded_scores_do_not_depend_on_a_texts_length(features: tuple[np.ndarray, ...]) -> None:
    own, other, asked = features
    found = certainty.fit_bounded(own, other, 0.01)
    assert np.allclose(certainty.scores(found, asked), certainty.scores(found, asked * 7), atol=1e-6)
    right = np.concatenate([certainty.scores(found, own) > 0.5, certainty.scores(found, other) < 0.5])
    assert right.mean() > 0.8


def test_each_text_is_weighed_by_who_knows_its_like() -> None:
    logits = np.array([[[1.0, 0.0], [2.0, 4.0]], [[3.0, 2.0], [0.0, 8.0]]])
    found = certainty.certain_mean(logits, np.array([[0.5, 1.0], [0.5, 0.25]]))
    assert np.allclose(found, [[2.0, 1.0], [1.6, 4.8]])
