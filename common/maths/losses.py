"""Losses between a learner's logits and its targets. `target` is what the wire carried for these texts."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

Loss = Callable[[Tensor, Tensor], Tensor]


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """CE against class numbers, mean over texts."""
    return F.cross_entropy(logits, labels)


def soft_cross_entropy(logits: Tensor, probabilities: Tensor) -> Tensor:
    """CE(y, p) = -sum_c y_c log p_c, mean over texts (FedID eq. 7)."""
    return -(probabilities * logits.log_softmax(dim=-1)).sum(dim=-1).mean()


def hard_cross_entropy(logits: Tensor, votes: Tensor) -> Tensor:
    """CE against the class that the target scores highest."""
    return F.cross_entropy(logits, votes.argmax(dim=-1))


def kl_divergence(logits: Tensor, probabilities: Tensor) -> Tensor:
    """KL(y || p), mean over texts: soft CE less the target's own entropy."""
    return F.kl_div(logits.log_softmax(dim=-1), probabilities, reduction="batchmean")


def squared_error(logits: Tensor, target: Tensor) -> Tensor:
    """Mean squared difference of logits, over texts and classes."""
    return F.mse_loss(logits, target)


def absolute_error(logits: Tensor, target: Tensor) -> Tensor:
    """Mean absolute difference of logits, over texts and classes."""
    return F.l1_loss(logits, target)


LOSSES: dict[str, Loss] = {
    "soft": soft_cross_entropy,
    "hard": hard_cross_entropy,
    "kl": kl_divergence,
    "mse": squared_error,
    "l1": absolute_error,
}
