"""DP-SGD at a site (Abadi et al. 2016), by Opacus: after it, whatever the model says is post-processing and free.

Texts are sampled and noise is drawn by the system's generator: the coordinator knows the run's seed, and a sample that
it could repeat would hide less than the accountant assumes.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from opacus.optimizers import DPOptimizer
from torch import Tensor

from fedstill.client.release.noise import standard_normal
from fedstill.client.release.privacy import Plan
from fedstill.common.models.learner import Batches, Learner, Rows
from fedstill.common.practice import Practice


class SystemNoise(DPOptimizer):  # type: ignore[misc]
    """Opacus's optimizer, with noise from the system's generator."""

    def add_noise(self) -> None:
        """Add the noise to the summed gradients of the clipped texts."""
        deviation = self.noise_multiplier * self.max_grad_norm
        for parameter in self.params:
            noise = torch.from_numpy(standard_normal(tuple(parameter.shape)) * deviation)
            parameter.grad = parameter.summed_grad.view_as(parameter) + noise.to(parameter)


def fit_privately(
    learner: Learner,
    texts: Batches,
    loss: Callable[[Tensor, Rows], Tensor],
    plan: Plan,
    practice: Practice,
    clip: float,
    multiplier: float,
) -> list[float]:
    """Train by steps of DP-SGD; return the mean loss of the texts seen, for the site's own eyes.

    One text at a time: its gradient is exact for every family and for adapters, and takes no more memory than one.
    """
    inner = learner.optimizer("local", practice)
    optimizer = SystemNoise(
        inner,
        noise_multiplier=multiplier,
        max_grad_norm=clip,
        expected_batch_size=max(1, round(plan.rate * len(texts))),
    )
    learner.model.train()
    losses: list[float] = []
    for done in range(plan.steps):
        learner.set_rate(inner, "local", practice, done / plan.steps)
        optimizer.zero_grad(set_to_none=True)
        sample = _sampled(len(texts), plan.rate)
        for number in sample:
            rows = np.array([number], np.int64)
            value = loss(learner.model(texts.batch(rows)), rows)
            value.backward()  # type: ignore[no-untyped-call]
            losses.append(float(value.detach()))
            _take_gradients(optimizer.params)
            optimizer.clip_and_accumulate()
            _forget(optimizer.params)
        for parameter in optimizer.params:
            if parameter.summed_grad is None:
                parameter.summed_grad = torch.zeros_like(parameter)
        optimizer.add_noise()
        for parameter in optimizer.params:
            parameter.grad /= optimizer.expected_batch_size
        inner.step()
    optimizer.zero_grad(set_to_none=True)
    return [float(np.mean(losses)) if losses else 0.0]


def _sampled(count: int, rate: float) -> NDArray[np.int64]:
    """Return a Poisson sample of the texts."""
    drawn = np.frombuffer(os.urandom(8 * count), np.uint64).astype(np.float64) * 2.0**-64
    return np.flatnonzero(drawn < rate).astype(np.int64)


def _take_gradients(parameters: list[Any]) -> None:
    """Hand one text's gradient to Opacus; one that is not finite counts as zero, or it would be seen."""
    finite = all(p.grad is None or bool(torch.isfinite(p.grad).all()) for p in parameters)
    for parameter in parameters:
        gradient = parameter.grad if finite and parameter.grad is not None else torch.zeros_like(parameter)
        parameter.grad_sample = gradient.unsqueeze(0)


def _forget(parameters: list[Any]) -> None:
    for parameter in parameters:
        parameter.grad_sample = parameter.grad = None
