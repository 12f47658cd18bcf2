"""FedID's feedback (eqs. 12 to 15): how a site's prediction moves the central model's loss on labelled texts.

The central step is theta' = theta - (eta / B) grad of -<y, log f(x0; theta)>, which is linear in y. By the chain rule
dL_val / dy = (eta / B) JVP(log f(x0; theta); v) with v = grad L_val at theta': one backward pass at the new weights,
one directional derivative at the old ones, and nothing is differentiated twice.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fedstill.common.maths.losses import cross_entropy

Weights = Mapping[str, Tensor]
Predict = Callable[[dict[str, Tensor]], Tensor]  # log f(x0; theta), texts x classes
Jacobian = Literal["auto", "jvp", "difference"]


def exact_feedback(directional: Tensor, eta: float) -> Tensor:
    """G = dL_val / dy (eq. 14 as far as it is the same for every site), from JVP(log f(x0; theta); v)."""
    return directional * (eta / len(directional))


def through_adamw(v: Tensor, second_moment: Tensor, step: int, betas: tuple[float, float], eps: float) -> Tensor:
    """v as AdamW's step number `step` passes it on if its second moment (after the step) were a constant.

    d theta' / d g = -eta (1 - beta1) / (1 - beta1^t) / (sqrt(vhat) + eps), number by number.
    """
    spread = (second_moment / (1 - betas[1] ** step)).sqrt() + eps
    return v * ((1 - betas[0]) / (1 - betas[0] ** step)) / spread


def through_softmax(feedback: Tensor, y: Tensor) -> Tensor:
    """dL_val / dz from dL_val / dy where y = softmax(z), for sites whose logits were averaged."""
    return y * (feedback - (y * feedback).sum(dim=-1, keepdim=True))


def directional_derivative(
    predict: Predict,
    theta: Weights,
    v: Weights,
    how: Jacobian = "auto",
    each: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Tensor:
    """JVP(log f; v) at theta. `auto` differences where an operation has no forward derivative.

    Every call of `predict` happens inside a new `each()`, which draws the dropout mask of the central step again.
    """
    if how == "difference":
        return central_difference(predict, theta, v, each)
    try:
        with each():
            return forward_mode(predict, theta, v)
    except (RuntimeError, NotImplementedError) as error:
        if how == "jvp":
            raise RuntimeError(
                "the central model has an operation without a forward derivative; set method.jacobian = 'auto' or "
                f"'difference' ({' '.join(str(error).split())[:200]})"
            ) from error
        warnings.warn(f"no forward derivative, so a central difference is taken: {error}", stacklevel=2)
        return central_difference(predict, theta, v, each)


def forward_mode(predict: Predict, theta: Weights, v: Weights) -> Tensor:
    """Use dual numbers, in one forward pass."""
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):  # the fused attention kernels have no forward derivative
        derivative: Tensor = torch.func.jvp(predict, (dict(theta),), (dict(v),))[1]
    return derivative.detach()


def central_difference(
    predict: Predict,
    theta: Weights,
    v: Weights,
    each: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Tensor:
    """Use two forward passes, a cube root of the rounding error to either side, which balances both kinds of error."""
    norm = float(torch.stack([direction.double().square().sum() for direction in v.values()]).sum().sqrt())
    smallest = min(torch.finfo(value.dtype).eps ** (1 / 3) for value in theta.values())
    length = smallest / norm if norm > 0 else 1.0
    sides = []
    with torch.no_grad():
        for side in (length, -length):
            with each():
                sides.append(predict({name: value + side * v[name] for name, value in theta.items()}))
    return (sides[0] - sides[1]) / (2 * length)


# --- terms of a site's loss ---


def exact_surrogate(logits: Tensor, feedback: Tensor, of: str) -> Tensor:
    """<G, p_k>, or <G_z, z_k> where logits were averaged: its gradient is eq. 14 but for w_k."""
    return (feedback * (logits if of == "logits" else logits.softmax(dim=-1))).sum()


def scalar_surrogate(logits: Tensor, h: float) -> Tensor:
    """The authors' estimate: h, the same for all texts, times CE against the site's own labels."""
    return h * cross_entropy(logits, logits.detach().argmax(dim=-1))
