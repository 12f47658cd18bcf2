"""Solvers of transport over labels: how near each is to the exact value and its gradient, and how long it takes.

1,024 texts and 5 classes on the line 1 to 5, as in fine-grained sentiment; student and teacher are drawn from the same
seeded Dirichlet(0.5). Exact values and gradients are the value and the dual variables of POT's linear programme;
gradients are centred before they are compared, since along the simplex a constant means nothing. Times are one forward
and backward pass in float32 on one thread, the median of REPEATS, the solvers taking turns. The numbers go to
experiments/bench/transport.json.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import ot
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from fedstill.common.data.tasks import on_a_line
from fedstill.common.maths.transport import cost_matrix, default_solver, geomloss_sinkhorn, log_sinkhorn, w1_1d

TEXTS, CLASSES, EPS, REPEATS = 1024, 5, 1e-3, 15
AUTHORS = "geomloss"  # at its defaults, as the authors' code calls it

Solve = Callable[[Tensor, Tensor], Tensor]
console = Console()


def solvers(points: Tensor) -> dict[str, Solve]:
    """What is measured, by the name it has in the table."""
    return {
        AUTHORS: lambda mu, nu: geomloss_sinkhorn(mu, nu, points, EPS),
        "geomloss_scaling_0.9": lambda mu, nu: geomloss_sinkhorn(mu, nu, points, EPS, scaling=0.9),
        "log_sinkhorn": lambda mu, nu: log_sinkhorn(mu, nu, cost_matrix(points), EPS),
        "w1_1d": lambda mu, nu: w1_1d(mu, nu, points),
    }


def exact(mu: np.ndarray, nu: np.ndarray, points: Tensor) -> tuple[Tensor, Tensor]:
    """Values and the centred subgradient by `mu`, from the linear programme and its dual."""
    cost = ot.dist(points.double().numpy(), metric="euclidean")
    solved = [ot.emd2(p, q, cost, log=True) for p, q in zip(mu, nu, strict=True)]
    values = torch.tensor([value for value, _ in solved], dtype=torch.float64)
    return values, centred(torch.tensor(np.array([log["u"] for _, log in solved])))


def centred(gradient: Tensor) -> Tensor:
    """The part of a gradient that lies along the simplex."""
    return gradient.double() - gradient.double().mean(dim=-1, keepdim=True)


def pass_through(solve: Solve, mu: Tensor, nu: Tensor) -> tuple[Tensor, Tensor, float]:
    """Values, gradients by `mu`, and the milliseconds that both took."""
    mu = mu.clone().requires_grad_()
    began = time.perf_counter()
    values = solve(mu, nu)
    (gradient,) = torch.autograd.grad(values.sum(), mu)
    return values.detach(), gradient, 1000 * (time.perf_counter() - began)


def main() -> None:
    """Measure, show, and write experiments/bench/transport.json."""
    torch.set_num_threads(1)
    points = torch.tensor(on_a_line(CLASSES))
    p, q = np.random.default_rng(20240229).dirichlet(np.full(CLASSES, 0.5), size=(2, TEXTS))
    values, subgradient = exact(p, q, points)
    mu, nu = (torch.from_numpy(x).float() for x in (p, q))
    times: dict[str, list[float]] = {name: [] for name in solvers(points)}
    found: dict[str, dict[str, float]] = {}
    for repeat in range(-2, REPEATS):  # the first two warm up
        for name, solve in solvers(points).items():
            got, gradient, taken = pass_through(solve, mu, nu)
            if repeat >= 0:
                times[name].append(taken)
            cosine = torch.cosine_similarity(centred(gradient), subgradient, dim=-1).mean()
            found[name] = {"error": float((got - values).abs().mean()), "grad_cosine": float(cosine)}
    for name, row in found.items():
        row["ms"] = statistics.median(times[name])
    target = Path(__file__).with_suffix(".json")
    target.write_text(json.dumps(found, indent=2) + "\n")
    show(found, float(values.mean()), default_solver(points))
    console.print(str(target), style="dim")


def show(found: dict[str, dict[str, float]], mean: float, ours: str) -> None:
    """The table, and whether the default is both nearer and faster than what the authors run."""
    table = Table("solver", "error of the value", "cosine of the gradient", "ms")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, row in found.items():
        table.add_row(name, f"{row['error']:.2e}", f"{row['grad_cosine']:.6f}", f"{row['ms']:.2f}")
    console.print(table)
    console.print(
        f"{TEXTS:,} texts, {CLASSES} classes on a line, eps {EPS:g}; mean exact value {mean:.3f}", style="dim"
    )
    nearer, faster = (found[AUTHORS][key] / max(found[ours][key], 1e-12) for key in ("error", "ms"))
    met = "met" if nearer > 1 and faster > 1 else "NOT met"
    console.print(
        f"target: {ours}, the default here, nearer and faster than {AUTHORS} at its defaults; "
        f"measured {nearer:,.0f} x nearer, {faster:,.1f} x faster: {met}",
        soft_wrap=True,
    )


if __name__ == "__main__":
    main()
