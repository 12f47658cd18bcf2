"""FedAUX's certainty scores: how much an auxiliary text resembles a site's own, by a private logistic regression."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedstill.common.maths.privacy import Draw

Matrix = NDArray[np.float32]
FLOOR = 1e-8  # added to every score, so that the sum over sites is never 0
SLACK = 1e-3  # how far from the optimum a bounded regression may be, in units of its sensitivity


@dataclass(frozen=True)
class Regression:
    """P(own | x) = sigmoid(coefficients . x / scale + intercept); without a scale each x is divided by its own norm."""

    coefficients: NDArray[np.float64]
    intercept: float
    scale: float | None


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


def fit_bounded(own: Matrix, negatives: Matrix, regulariser: float, per_text: bool = True) -> Regression:
    """Fit the regression whose `sensitivity` is known: every text has norm 1, and the intercept is regularised too.

    The largest norm and a free intercept may move by any amount when one text changes.
    """
    from sklearn.linear_model import LogisticRegression

    features = np.concatenate([own, negatives]).astype(np.float64)
    texts = np.hstack([_unit(features), np.ones((len(features), 1))]) / math.sqrt(2)
    strength = regulariser if per_text else regulariser / len(texts)  # beside the mean loss
    labels = np.repeat([1.0, 0.0], [len(own), len(negatives)])
    exact = {"solver": "newton-cholesky", "tol": 1e-10, "max_iter": 1000, "fit_intercept": False}
    w = LogisticRegression(C=1.0 / (strength * len(texts)), **exact).fit(texts, labels).coef_[0]
    slope = texts.T @ (1 / (1 + np.exp(-texts @ w)) - labels) / len(texts) + strength * w
    if np.linalg.norm(slope) / strength > SLACK * sensitivity(len(texts), regulariser, per_text):
        raise ValueError("the regression has not settled, so that noise would not hide a text; raise the regulariser")
    return Regression(w[:-1] / math.sqrt(2), float(w[-1]) / math.sqrt(2), None)


def sensitivity(texts: int, regulariser: float, per_text: bool = True) -> float:
    """How far one text moves coefficients and intercept of `fit_bounded`: 2 / (n lambda) in its own units, / sqrt 2.

    Chaudhuri et al. 2011, with what the solver may be off by; beside the sum of losses lambda is regulariser / n.
    """
    return 2.0 / (regulariser * (texts if per_text else 1)) / math.sqrt(2) * (1 + 2 * SLACK)


def gaussian_deviation(epsilon: float, delta: float) -> float:
    """sqrt(2 ln(1.25 / delta)) / epsilon, in units of the sensitivity; proven for epsilon up to 1."""
    return math.sqrt(2.0 * math.log(1.25 / delta)) / epsilon


def with_noise(regression: Regression, deviation: float, draw: Draw) -> Regression:
    """Add Gaussian noise of that deviation to coefficients and intercept."""
    noise = deviation * draw((len(regression.coefficients) + 1,))
    return Regression(regression.coefficients + noise[:-1], regression.intercept + float(noise[-1]), regression.scale)


def scores(regression: Regression, features: Matrix) -> Matrix:
    """s(x) = P(own | x) + 1e-8."""
    from scipy.special import expit

    wide = features.astype(np.float64)
    scaled = _unit(wide) if regression.scale is None else wide / regression.scale
    logits = scaled @ regression.coefficients + regression.intercept
    return np.asarray(expit(logits) + FLOOR, np.float32)


def certain_mean(logits: NDArray[np.floating], certainty: NDArray[np.floating]) -> Matrix:
    """sum_k s_k(x) z_k(x) / sum_k s_k(x), of sites x texts x classes and sites x texts."""
    weights = certainty.astype(np.float64)[:, :, None]
    return np.asarray((weights * logits).sum(axis=0) / weights.sum(axis=0), np.float32)


def _unit(features: NDArray[np.float64]) -> NDArray[np.float64]:
    """Scale every row to norm 1; a row of zeros stays."""
    norms = np.linalg.norm(features, axis=1, keepdims=True)
    return np.asarray(features / np.where(norms > 0, norms, 1.0))
