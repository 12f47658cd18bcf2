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


def test_noise_has_the_variance_of_the_formula() -> None:
    variance = certainty.noise_variance(100, 0.01, 0.1, 1e-5)
    assert variance == pytest.approx(2 * math.log(125000) * 4 / 0.01)  # s = 2 / (100 x 0.01) = 2
    plain = certainty.Regression(np.zeros(20000), 0.0, 1.0)
    noisy = certainty.with_noise(plain, variance, np.random.default_rng(0))
    assert np.var(noisy.coefficients) == pytest.approx(variance, rel=0.05)
    assert noisy.intercept != 0


def test_each_text_is_weighed_by_who_knows_its_like() -> None:
    logits = np.array([[[1.0, 0.0], [2.0, 4.0]], [[3.0, 2.0], [0.0, 8.0]]])
    found = certainty.certain_mean(logits, np.array([[0.5, 1.0], [0.5, 0.25]]))
    assert np.allclose(found, [[2.0, 1.0], [1.6, 4.8]])
