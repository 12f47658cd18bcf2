"""Two models that learn from the same batch and from each other (FedKD of Wu et al.)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fedstill.common.maths.losses import kl_divergence

Outputs = tuple[Tensor, tuple[Tensor, ...]]  # logits, and hidden states from the embeddings to the last layer


def comparable(one: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> bool:
    """Return whether two models' hidden states have the same layers, tokens and width."""
    return [state.shape for state in one] == [state.shape for state in other]


def hidden_distance(one: tuple[Tensor, ...], other: tuple[Tensor, ...], mask: Tensor) -> Tensor:
    """Mean squared difference of hidden states over layers, real tokens and directions."""
    real = mask.bool()
    return torch.stack([F.mse_loss(a[real], b[real]) for a, b in zip(one, other, strict=True)]).mean()


def mutual_losses(
    teacher: Outputs, student: Outputs, labels: Tensor, mask: Tensor | None, joint: bool = False
) -> tuple[Tensor, Tensor]:
    """L_t = CE_t + [KL(p_s || p_t) + MSE] / (CE_t + CE_s), and L_s likewise with KL(p_t || p_s).

    Each loss treats the other model's outputs as constants, unless `joint`. Without a mask there is no MSE.
    """
    return _one_loss(teacher, student, labels, mask, joint), _one_loss(student, teacher, labels, mask, joint)


def _one_loss(own: Outputs, other: Outputs, labels: Tensor, mask: Tensor | None, joint: bool) -> Tensor:
    if not joint:
        other = (other[0].detach(), tuple(state.detach() for state in other[1]))
    mine, theirs = F.cross_entropy(own[0], labels), F.cross_entropy(other[0], labels)
    learn = kl_divergence(own[0], other[0].softmax(dim=-1))
    if mask is not None:
        learn = learn + hidden_distance(own[1], other[1], mask)
    return mine + learn / (mine + theirs)
