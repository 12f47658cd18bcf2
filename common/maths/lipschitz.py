"""Exact transport between distributions over a few labels, all texts at once, from a table that the cost gives once.

With a metric cost the dual of transport without entropy is max <f, mu - nu> over functions with f_i - f_j <= C_ij. The
corners of that polytope depend on the cost alone: each is a spanning tree of tight, directed edges, and five labels
have at most 70. The best corner of a text says which labels exchange mass; how much follows from its tree, and so do
the potentials of entropic transport, but for terms that vanish as exp(-gap / eps).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import product

import torch
from torch import Tensor

MOST_LABELS = 6  # 1,296 trees of six labels, 16,807 of seven
TIGHT = 1e-9  # of the largest cost
LEAST_MASS = 1e-12  # for the logarithm of what a tree leaves out


@dataclass(frozen=True)
class Corners:
    """The corners of a cost's Lipschitz polytope: for each, its tree by the paths from label 0, and its functions."""

    paths: Tensor  # (V, C, C - 1): 1 where the way from label 0 to this one follows an edge, -1 against it
    begins: Tensor  # (V, C - 1): where each edge begins ...
    ends: Tensor  # ... and ends
    f: Tensor  # (V, C)


def corners(cost: Tensor) -> Corners | None:
    """Return the corners for a cost matrix; None if they are too many to list, or some labels lie on a line.

    On a line a mass may as well stop on its way, so that a corner has more than one tree.
    """
    if not 2 <= len(cost) <= MOST_LABELS:
        return None
    found = _corners(tuple(map(tuple, cost.detach().cpu().double().tolist())))
    if found is None or cost.device.type == "cpu":
        return found
    return Corners(*(part.to(cost.device) for part in (found.paths, found.begins, found.ends, found.f)))


@lru_cache(maxsize=16)
def _corners(rows: tuple[tuple[float, ...], ...]) -> Corners | None:
    cost = torch.tensor(rows, dtype=torch.float64)
    tol, apart = TIGHT * float(cost.max()), ~torch.eye(len(cost), dtype=torch.bool)
    detours = cost.unsqueeze(2) + cost.unsqueeze(0)  # from i by k to j
    real = apart.unsqueeze(2) & apart.unsqueeze(0) & apart.unsqueeze(1)
    strict = bool((detours > cost.unsqueeze(1) + tol)[real].all()) and bool((cost[apart] > tol).all())
    if not strict or not torch.equal(cost, cost.T) or bool((cost.diagonal() != 0).any()):
        return None
    signs = torch.tensor(list(product((1.0, -1.0), repeat=len(cost) - 1)), dtype=torch.float64)
    paths, begins, ends = [], [], []
    for parent in _trees(len(cost)):
        child = torch.arange(1, len(cost))
        on_path = _on_path(parent)
        turned = signs.unsqueeze(1) * on_path  # every direction of every edge
        f = -turned @ cost[child, parent]
        inside = (f.unsqueeze(2) - f.unsqueeze(1) <= cost + tol).all(2).all(1)
        forward = signs[inside] > 0
        paths.append(turned[inside])
        begins.append(torch.where(forward, parent, child))
        ends.append(torch.where(forward, child, parent))
    tree, begin, end = torch.cat(paths), torch.cat(begins), torch.cat(ends)
    f = -(tree @ cost[begin, end].unsqueeze(-1)).squeeze(-1)
    return Corners(tree, begin, end, f - f.mean(-1, keepdim=True))


def _trees(labels: int) -> list[Tensor]:
    """Return all labelled trees: the parents of labels 1, 2, ... when label 0 is the root."""
    found = []
    for parents in product(range(labels), repeat=labels - 1):
        depth, known = 0, {0}
        while len(known) < labels and depth < labels:
            known |= {child for child, parent in enumerate(parents, 1) if parent in known}
            depth += 1
        if len(known) == labels:
            found.append(torch.tensor(parents))
    return found


def _on_path(parent: Tensor) -> Tensor:
    """Return (C, C - 1): whether the edge above label e + 1 is on the way from label 0 to each label."""
    labels = len(parent) + 1
    found = torch.zeros(labels, labels - 1, dtype=torch.float64)
    for label in range(1, labels):
        at = label
        while at:
            found[label, at - 1] = 1.0
            at = int(parent[at - 1])
    return found


def potential_near(mu: Tensor, nu: Tensor, cost: Tensor, eps: float, table: Corners) -> Tensor:
    """Return a potential g of entropic transport that is right but for what eps lets pass beside the best tree."""
    delta = mu - nu
    best = (delta @ table.f.T).argmax(-1)
    paths, begin, end = table.paths[best], table.begins[best], table.ends[best]
    flow = (-paths.mT @ delta.unsqueeze(-1)).squeeze(-1).clamp_min(LEAST_MASS)
    stays = (mu - torch.zeros_like(mu).scatter_add_(-1, begin, flow)).clamp_min(LEAST_MASS)
    log_mu, log_nu = mu.clamp_min(LEAST_MASS).log(), nu.clamp_min(LEAST_MASS).log()
    at_home = eps * (stays.log() - log_mu - log_nu)  # f_i + g_i
    across = cost[begin, end] + eps * (flow.log() - log_mu.gather(-1, begin) - log_nu.gather(-1, end))  # f_i + g_j
    return (paths @ (across - at_home.gather(-1, begin)).unsqueeze(-1)).squeeze(-1)
