"""Weights of sites by how well they fit their own texts (AdaFD, section V.A), over the given sites."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float32]
Losses = Mapping[str, float]
Rule = Callable[[Losses], dict[str, float]]

SMALLEST = 1e-12  # a loss of 0 would have an infinite reciprocal


def rnwc(losses: Losses, epsilon: float = 0.0) -> dict[str, float]:
    """w_k = (1 / l_k) / sum_j (1 / l_j) (eq. 6); the authors' code adds epsilon to each loss."""
    return normalised({name: 1.0 / max(loss + epsilon, SMALLEST) for name, loss in losses.items()})


def enwc(losses: Losses, beta: float = 5.0) -> dict[str, float]:
    """w_k = exp(-beta l_k) / sum_j exp(-beta l_j) (eq. 7)."""
    least = min(losses.values())
    return normalised({name: float(np.exp(-beta * (loss - least))) for name, loss in losses.items()})


def normalised(shares: Mapping[str, float]) -> dict[str, float]:
    """Normalise shares to sum to one."""
    total = sum(shares.values())
    if not (np.isfinite(total) and total > 0 and min(shares.values()) >= 0):
        raise ValueError(f"these are no weights: {dict(shares)}")
    return {name: share / total for name, share in shares.items()}


def per_class(
    losses: Mapping[str, Sequence[float | None]], overall: Losses, rule: Rule
) -> dict[str, NDArray[np.float64]]:
    """Apply the rule to each class separately: C weights per site.

    A site without texts of a class (None) gets no weight there; if no site has any, the overall losses count.
    """
    classes = len(next(iter(losses.values())))
    weights = {name: np.zeros(classes) for name in losses}
    for c in range(classes):
        known = {name: loss for name, row in losses.items() if (loss := row[c]) is not None}
        for name, weight in rule(known or overall).items():
            weights[name][c] = weight
    return weights


def best_beta(candidates: Mapping[float, Matrix], labels: NDArray[np.int64]) -> float:
    """Return the beta whose ensemble logits of labelled texts have the least CE; the smaller of two equals."""
    rows = np.arange(len(labels))
    costs = {beta: -log_probabilities(zhat)[rows, labels].mean() for beta, zhat in candidates.items()}
    return min(sorted(costs), key=lambda beta: costs[beta])


def fitted_weights(
    logits: Mapping[str, Matrix], labels: NDArray[np.int64], towards: Mapping[str, float], ridge: float
) -> dict[str, float]:
    """The w >= 0 that minimise sum_i CE(y_i, softmax(sum_k w_k z_ki)) + ridge K sum_k (w_k - towards_k)^2.

    They need not sum to one: their sum is the temperature at which the sum of logits is right about how sure it is.
    """
    from scipy.optimize import minimize  # half a second, which only a fit should pay

    z = np.stack([logits[name] for name in towards]).astype(np.float64)  # sites x texts x classes
    start, rows = np.array(list(towards.values())), np.arange(len(labels))

    def cost(w: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        log_probs = log_probabilities(np.tensordot(w, z, axes=1))
        error = np.exp(log_probs)
        error[rows, labels] -= 1.0
        pull = ridge * len(w) * (w - start)
        gradient = np.tensordot(z, error, axes=2) + 2 * pull
        return float(-log_probs[rows, labels].sum() + (pull * (w - start)).sum()), gradient

    found = minimize(cost, start, jac=True, method="L-BFGS-B", bounds=[(0.0, None)] * len(start))
    weights = dict(zip(towards, found.x.tolist(), strict=True))
    return weights if found.x.sum() > 0 else dict(towards)


def log_shares(counts: NDArray[np.int64]) -> NDArray[np.float32]:
    """Logarithms of the classes' shares, each class counted once more than it is there."""
    shares = (counts + 1.0) / (counts.sum() + len(counts))
    return np.asarray(np.log(shares), np.float32)


# --- what a site reports ---


def log_probabilities(logits: NDArray[np.floating]) -> NDArray[np.float64]:
    """log softmax of each row."""
    z = logits.astype(np.float64)
    z -= z.max(axis=-1, keepdims=True)
    return np.asarray(z - np.log(np.exp(z).sum(axis=-1, keepdims=True)))


def mean_entropy(logits: Matrix) -> float:
    """Entropy of the predictions, mean over texts, in nats."""
    log_probs = log_probabilities(logits)
    return float(-(np.exp(log_probs) * log_probs).sum(axis=-1).mean())


def class_losses(logits: Matrix, labels: NDArray[np.int64]) -> list[float | None]:
    """Mean CE of the texts of each class; None for a class without texts."""
    losses = -log_probabilities(logits)[np.arange(len(labels)), labels]
    return [float(losses[labels == c].mean()) if (labels == c).any() else None for c in range(logits.shape[1])]
