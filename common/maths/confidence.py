"""How far each teacher is trusted on each text, and divergences per text (Confident Sinkhorns, section 5.2)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Weights = NDArray[np.float64]


def equal(teachers: NDArray[np.float32]) -> Weights:
    """A: W_k(x) = 1."""
    return normalised(np.ones(teachers.shape[:2]))


def by_texts(teachers: NDArray[np.float32], sizes: NDArray[np.int64]) -> Weights:
    """D: W_k = n_k / sum of n."""
    return normalised(np.broadcast_to(sizes[:, None].astype(np.float64), teachers.shape[:2]))


def from_uniform(teachers: NDArray[np.float32]) -> Weights:
    """U: W_k(x) = ||h_k(x) - uniform||_2."""
    return from_bias(teachers, np.full((len(teachers), teachers.shape[-1]), 1 / teachers.shape[-1]))


def from_bias(teachers: NDArray[np.float32], biases: NDArray[np.floating]) -> Weights:
    """E: W_k(x) = ||h_k(x) - B_k||_2, the L2 confidence."""
    return normalised(np.linalg.norm(teachers.astype(np.float64) - biases[:, None, :], axis=-1))


def normalised(weights: Weights) -> Weights:
    """W_k(x) / sum_k W_k(x) over teachers (first axis); equal shares for a text without any confidence."""
    total = weights.sum(axis=0, keepdims=True)
    return np.where(total > 0, weights / np.where(total > 0, total, 1.0), 1 / len(weights))


def kl(logits: Tensor, probabilities: Tensor) -> Tensor:
    """KL(h_k || h) of each text; a class that h_k rules out adds nothing."""
    return (probabilities.xlogy(probabilities) - probabilities * logits.log_softmax(dim=-1)).sum(dim=-1)


def symmetric_kl(logits: Tensor, probabilities: Tensor) -> Tensor:
    """Half of KL(h_k || h) + KL(h || h_k), over the number of classes as the authors' code has it."""
    log_probs = logits.log_softmax(dim=-1)
    wanted = probabilities.clamp_min(1e-30).log()  # float32 rounds a confident teacher's other classes to 0
    return 0.5 * ((log_probs.exp() - probabilities) * (log_probs - wanted)).mean(dim=-1)
