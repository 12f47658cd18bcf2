"""Optimal transport between distributions over the same labels, whose points say how far one label is from another.

Confident Sinkhorns (Bhardwaj et al. 2021), eq. 2: T(mu, nu) = min over plans of <pi, cost> + eps KL(pi || mu x nu).
All solvers take two (..., C) tensors of distributions, of the same shape, and give one value a text.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fedstill.common.maths.lipschitz import corners, potential_near

Solver = Callable[[Tensor, Tensor, Tensor, float], Tensor]

SMALLEST = 1e-10  # a smaller probability counts as 0: far below any tolerance, and its logarithm hinders convergence
ANNEALING = 0.25  # ratio of eps between one level and the one before
ROUGH = 1e-1  # tolerance of the levels above the last, which only lead to it
NEAR = 0.02  # below this share of the largest cost, eps is small enough to start from transport without entropy
FEW = 30  # steps from there before a text is annealed instead
ENOUGH = 0.25  # of the gain that its slope promises: a Newton step that has less is searched for a better length
LONGEST = 1024.0  # how many eps a Newton step may move a potential


def cost_matrix(points: Tensor) -> Tensor:
    """Euclidean distance between every two labels."""
    exact = points.double()
    return torch.cdist(exact, exact, compute_mode="donot_use_mm_for_euclid_dist")


# --- entropic transport, solved to a tolerance ---


def log_sinkhorn(mu: Tensor, nu: Tensor, cost: Tensor, eps: float, tol: float = 1e-6, most_steps: int = 200) -> Tensor:
    """The dual value of eq. 2 (not debiased). Differentiable by `mu` alone: its gradient is the potential f.

    `tol` bounds the mass by which the plan misses nu; it meets mu exactly.
    """
    value: Tensor = _Entropic.apply(mu, nu, cost, eps, tol, most_steps)  # type: ignore[no-untyped-call]
    return value


class _Entropic(torch.autograd.Function):
    """Value forward, potential backward: by the envelope theorem no iteration is differentiated."""

    @staticmethod
    def forward(ctx: Any, mu: Tensor, nu: Tensor, cost: Tensor, eps: float, tol: float, most_steps: int) -> Tensor:
        if eps <= 0:
            raise ValueError(f"eps = {eps} must be above 0; for transport without entropy on a line take w1_1d")
        place = "cpu" if mu.device.type == "mps" else mu.device  # potentials are thousands of eps: float64
        p, q = (_cleared(x.detach().to(place, torch.float64)) for x in (mu, nu))
        cost = cost.detach().to(place, torch.float64)
        g = _potential(p, q, cost, eps, tol, most_steps)
        f = _softmin(q.log(), g, cost, eps)
        value = (p * f).sum(-1) + (q * g).sum(-1)  # eq. 6: its last term is 0 where a marginal is met
        # (f + c, g - c) is as good a pair for every c: the one that sums to zero has a gradient along the simplex.
        ctx.save_for_backward((f - f.mean(-1, keepdim=True)).view(mu.shape).to(mu))
        return value.view(mu.shape[:-1]).to(mu)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (f,) = ctx.saved_tensors
        return grads[0].unsqueeze(-1) * f, None, None, None, None, None


def _cleared(probabilities: Tensor) -> Tensor:
    """Zero tiny entries and renormalise. A label that one side leaves out still has a potential, by the softmin."""
    rows = probabilities.reshape(-1, probabilities.shape[-1])
    rows = rows.masked_fill(rows < SMALLEST, 0.0)
    return rows / rows.sum(-1, keepdim=True)


def _softmin(log_weights: Tensor, potential: Tensor, cost: Tensor, eps: float) -> Tensor:
    """Lines 5 and 6 of Algorithm 1, with the sign that the paper omits: -eps LSE_j(log w_j + (g_j - C_ij) / eps)."""
    return -eps * torch.logsumexp(log_weights.unsqueeze(-2) + (potential.unsqueeze(-2) - cost) / eps, dim=-1)


def _potential(mu: Tensor, nu: Tensor, cost: Tensor, eps: float, tol: float, most_steps: int) -> Tensor:
    """Return the potential g: from the best corner of the dual without entropy where eps is small, else annealed."""
    g, left = torch.zeros_like(nu), torch.arange(len(mu), device=mu.device)
    table = corners(cost) if eps < NEAR * float(cost.max()) else None
    if table is not None:
        g = potential_near(mu, nu, cost, eps, table)
        left = _solve_level(g, mu, nu, cost, eps, tol, min(most_steps, FEW))
    if len(left):
        some = torch.zeros_like(nu[left])
        level = max(float(cost.max()), eps)
        while level > eps:  # from the cost's diameter down to eps, each level starting from the last
            _solve_level(some, mu[left], nu[left], cost, level, ROUGH, most_steps)
            level = max(level * ANNEALING, eps)
        missed = _solve_level(some, mu[left], nu[left], cost, eps, tol, most_steps)
        g[left] = some
        if len(missed):
            warnings.warn(
                f"log_sinkhorn: {len(missed)} of {len(mu)} texts are not within {tol:g} after {most_steps} steps at "
                f"eps = {eps:g}; a larger eps or tol converges sooner",
                stacklevel=2,
            )
    return g


def _solve_level(g: Tensor, mu: Tensor, nu: Tensor, cost: Tensor, eps: float, tol: float, most_steps: int) -> Tensor:
    """Raise the dual in g, in place, until no text misses nu by more than tol; return which ones still do.

    Sinkhorn's sweep alone stalls where eps is far below the distance of two labels: at 1e-3 a thousand sweeps leave a
    quarter of the texts short of 1e-6, some by 0.1. Between sweeps, a Newton step on the dual with f eliminated,
    <mu, f(g)> + <nu, g>, moves the texts that have not converged; labels are few, so its system is small.
    """
    log_mu, log_nu = mu.log(), nu.log()
    steps = torch.tensor([0.0] + [4.0**-k for k in range(8)]).to(g).view(-1, 1, 1)
    constant = torch.full_like(cost, 1 / len(cost)) + 1e-12 * torch.eye(len(cost)).to(cost)
    remaining = torch.arange(len(mu), device=mu.device)
    for _ in range(most_steps):
        m, n, log_n = mu[remaining], nu[remaining], log_nu[remaining]
        at = _softmin(log_mu[remaining], _softmin(log_n, g[remaining], cost, eps), cost.T, eps)
        g[remaining] = at
        exponents = log_n.unsqueeze(-2) + (at.unsqueeze(-2) - cost) / eps
        lse = exponents.logsumexp(-1, keepdim=True)
        rows = (exponents - lse).exp()  # pi_ij / mu_i
        marginal = (m.unsqueeze(-2) @ rows).squeeze(-2)
        missed = n - marginal  # the gradient
        unsolved = missed.abs().sum(-1) > tol
        remaining = remaining[unsolved]
        if not len(remaining):
            break
        parts = (m, n, log_n, at, rows, marginal, missed, -eps * lse.squeeze(-1))
        m, n, log_n, at, rows, marginal, missed, f = (part[unsolved] for part in parts)
        # The Hessian is this over -eps; `constant` fixes the direction in which nothing changes.
        curvature = torch.diag_embed(marginal) - rows.mT @ (m.unsqueeze(-1) * rows) + constant
        step = torch.linalg.solve(curvature, missed)
        step *= (LONGEST / step.abs().amax(-1, keepdim=True)).clamp(max=1.0)
        tried = at + eps * step
        gained = _dual(m, n, log_n, tried, cost, eps) - (m * f).sum(-1) - (n * at).sum(-1)
        poor = gained < ENOUGH * eps * (missed * step).sum(-1)
        if poor.any():
            search = at[poor] + eps * steps * step[poor]
            dual = _dual(m[poor], n[poor], log_n[poor], search, cost, eps)
            tried[poor] = search[dual.argmax(0), torch.arange(search.shape[1], device=mu.device)]
        g[remaining] = tried
    return remaining


def _dual(mu: Tensor, nu: Tensor, log_nu: Tensor, g: Tensor, cost: Tensor, eps: float) -> Tensor:
    """The dual with f eliminated."""
    return (mu * _softmin(log_nu, g, cost, eps)).sum(-1) + (nu * g).sum(-1)


# --- other solvers ---


def positions_on_line(points: Tensor) -> Tensor | None:
    """Return where each point lies on the line through all of them, from the first point on; None if there is none."""
    moved = points.double() - points.double()[0]
    lengths = moved.norm(dim=-1)
    direction = moved[lengths.argmax()] / lengths.max().clamp_min(1e-300)
    positions = moved @ direction
    aside = (moved - positions.unsqueeze(-1) * direction).norm(dim=-1)
    return None if bool(aside.max() > 1e-6 * lengths.max()) else positions


def w1_1d(mu: Tensor, nu: Tensor, points: Tensor) -> Tensor:
    """Transport on a line without entropy, in closed form: sum of |difference of the CDFs| times the gap."""
    positions = positions_on_line(points)
    if positions is None:
        raise ValueError(
            f"w1_1d needs labels on one line, and these {len(points)} points are not; use the solver log_sinkhorn"
        )
    order = positions.argsort()
    gaps = positions[order].diff().to(mu)
    ahead = (mu - nu)[..., order.to(mu.device)].cumsum(-1)[..., :-1]
    return (ahead.abs() * gaps).sum(-1)


def geomloss_sinkhorn(mu: Tensor, nu: Tensor, points: Tensor, blur: float, scaling: float = 0.5) -> Tensor:
    """The same problem by GeomLoss, as the authors call it: with p = 1 the cost is Euclidean and eps is the blur."""
    from geomloss import SamplesLoss

    solve = SamplesLoss("sinkhorn", p=1, blur=blur, scaling=scaling, debias=False, backend="tensorized")
    p, q = (x.reshape(-1, x.shape[-1]).contiguous() for x in (mu, nu))
    at = points.to(mu).expand(len(p), *points.shape).contiguous()
    value: Tensor = solve(p, at, q, at)
    return value.view(mu.shape[:-1])


SOLVERS: dict[str, Solver] = {
    "geomloss": lambda mu, nu, points, eps: geomloss_sinkhorn(mu, nu, points, blur=eps),
    "log_sinkhorn": lambda mu, nu, points, eps: log_sinkhorn(mu, nu, cost_matrix(points), eps),
    "w1_1d": lambda mu, nu, points, eps: w1_1d(mu, nu, points),
}


def default_solver(points: Tensor) -> str:
    """Return the closed form where the labels lie on a line, else the entropic solver."""
    return "log_sinkhorn" if positions_on_line(points) is None else "w1_1d"
