"""Pseudo texts in embedding space and FedDRS's losses on them (eqs. 6 to 8), in whole batches."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from fedstill.common.maths.losses import kl_divergence

Answers = Callable[
    [Tensor, Tensor], tuple[Tensor, Tensor]
]  # (theta, labels) -> logits where the model answers, and the right answers


def draw_labels(counts: Tensor, number: int) -> Tensor:
    """Labels drawn from the histogram gamma_k."""
    return torch.multinomial(counts.float(), number, replacement=True)


def draw_rows(embed: Callable[[Tensor], Tensor], vocabulary: int, texts: int, tokens: int) -> Tensor:
    """Sample at random: embeddings of uniformly drawn token numbers."""
    return embed(torch.randint(vocabulary, (texts, tokens))).detach().clone()


def draw_gaussian(table: Tensor, texts: int, tokens: int) -> Tensor:
    """Another reading of random sampling: Gaussian, with the embeddings' mean and deviation in every direction."""
    table = table.detach()
    noise = torch.randn(texts, tokens, table.shape[1]).to(table)
    return table.mean(dim=0) + noise * table.std(dim=0)


def target_loss(teacher: Answers, theta: Tensor, labels: Tensor) -> Tensor:
    """CE(f_k(theta), gamma_k), mean over answers (eq. 6)."""
    return F.cross_entropy(*teacher(theta, labels))


def adversary_loss(teacher: Answers, student: Answers, theta: Tensor, labels: Tensor, strength: float) -> Tensor:
    """CE(f_k(theta), gamma_k) - lambda CE(f_S(theta), gamma_k) (eq. 7)."""
    return target_loss(teacher, theta, labels) - strength * target_loss(student, theta, labels)


def adversary_loss_kl(teacher: Answers, student: Answers, theta: Tensor, labels: Tensor, strength: float) -> Tensor:
    """CE(f_k(theta), gamma_k) - lambda KL(softmax f_k(theta) || softmax f_S(theta)): figure 4's other adversary."""
    logits, right = teacher(theta, labels)
    return F.cross_entropy(logits, right) - strength * kl_divergence(student(theta, labels)[0], logits.softmax(dim=-1))


def improve(theta: Tensor, loss: Callable[[Tensor], Tensor], rate: float, steps: int) -> Tensor:
    """Take plain gradient steps on the samples, each down its own loss, independent of the batch size."""
    for _ in range(steps):
        theta = theta.detach().requires_grad_()
        (slope,) = torch.autograd.grad(loss(theta) * len(theta), theta)
        theta = theta - rate * slope
    return theta.detach()


def teacher_says(teacher: Answers, theta: Tensor, labels: Tensor) -> Tensor:
    """softmax f_k(theta) where the teacher answers."""
    with torch.no_grad():
        return teacher(theta, labels)[0].softmax(dim=-1)


def pseudo_distillation(student: Answers, theta: Tensor, labels: Tensor, teacher: Tensor) -> Tensor:
    """KL(softmax f_k(theta) || softmax f_S(theta)), mean over answers (a term of eq. 8)."""
    return kl_divergence(student(theta, labels)[0], teacher)
