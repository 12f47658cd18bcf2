"""FedAUX's certainty scores: how much an auxiliary text resembles a site's own, by a private logistic regression."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float32]
FLOOR = 1e-8  # added to every score, so that the sum over sites is never 0


@dataclass(frozen=True)
class Regression:
    """P(own | x) = sigmoid(coefficients . x / scale + intercept)."""

    coefficients: NDArray[np.float64]
    intercept: float
    scale: float


def fit(own: Matrix, negatives: Matrix, regulariser: float, per_text: bool = True) -> Regression:
    """Fit a logistic regression of own texts against negatives, features divided by the largest norm among them.

    The L2 term is regulariser / 2 ||w||^2 beside the mean loss of a text, or beside the sum of losses.
    """
    from sklearn.linear_model import LogisticRegression

    features = np.concatenate([own, negatives]).astype(np.float64)
    scale = float(np.linalg.norm(features, axis=1).max())
    strength = 1.0 / (regulariser * (len(features) if per_text else 1))
    labels = np.repeat([1, 0], [len(own), len(negatives)])
    model = LogisticRegression(C=strength, max_iter=1000).fit(features / scale, labels)
    return Regression(model.coef_[0], float(model.intercept_[0]), scale)


def noise_variance(texts: int, regulariser: float, epsilon: float, delta: float) -> float:
    """2 ln(1.25 / delta) s^2 / epsilon^2 with sensitivity s = 2 / (n regulariser)."""
    sensitivity = 2.0 / (texts * regulariser)
    return 2.0 * math.log(1.25 / delta) * sensitivity**2 / epsilon**2


def with_noise(regression: Regression, variance: float, rng: np.random.Generator) -> Regression:
    """Add Gaussian noise of that variance to coefficients and intercept."""
    noise = rng.normal(scale=math.sqrt(variance), size=len(regression.coefficients) + 1)
    return Regression(regression.coefficients + noise[:-1], regression.intercept + float(noise[-1]), regression.scale)


def scores(regression: Regression, features: Matrix) -> Matrix:
    """s(x) = P(own | x) + 1e-8."""
    from scipy.special import expit

    logits = features.astype(np.float64) / regression.scale @ regression.coefficients + regression.intercept
    return np.asarray(expit(logits) + FLOOR, np.float32)


def certain_mean(logits: NDArray[np.floating], certainty: NDArray[np.floating]) -> Matrix:
    """sum_k s_k(x) z_k(x) / sum_k s_k(x), of sites x texts x classes and sites x texts."""
    weights = certainty.astype(np.float64)[:, :, None]
    return np.asarray((weights * logits).sum(axis=0) / weights.sum(axis=0), np.float32)
