"""The corners of the dual of transport: as many as theory says, and the best one has POT's exact value."""

from __future__ import annotations

import math

import numpy as np
import ot
import pytest
import torch

from fedstill.common.maths.lipschitz import corners, potential_near
from fedstill.common.maths.transport import cost_matrix, log_sinkhorn


def generic(labels: int) -> torch.Tensor:
    return cost_matrix(torch.randn(labels, 2, generator=torch.Generator().manual_seed(labels)))


def drawn(labels: int, texts: int = 100) -> tuple[torch.Tensor, torch.Tensor]:
    p, q = np.random.default_rng(labels).dirichlet(np.full(labels, 0.5), size=(2, texts))
    return torch.from_numpy(p), torch.from_numpy(q)


@pytest.mark.parametrize("labels", [2, 3, 4, 5, 6])
def test_a_generic_metric_has_as_many_corners_as_a_root_polytope_has_simplices(labels: int) -> None:
    table = corners(generic(labels))
    assert table is not None
    assert len(table.f) == math.comb(2 * labels - 2, labels - 1)


@pytest.mark.parametrize("labels", [2, 3, 5, 6])
def test_the_best_corner_has_the_exact_value(labels: int) -> None:
    cost, (mu, nu) = generic(labels), drawn(labels)
    table = corners(cost)
    assert table is not None
    found = ((mu - nu) @ table.f.T).amax(-1)
    exact = [ot.emd2(p, q, cost.numpy()) for p, q in zip(mu.numpy(), nu.numpy(), strict=True)]
    assert np.allclose(found.numpy(), exact, atol=1e-9)


def test_potentials_near_the_corner_make_a_plan_with_both_marginals() -> None:
    """Three labels apart by more than many eps: nothing but the tree carries mass."""
    cost, eps, (mu, nu) = cost_matrix(torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.5]])), 1e-3, drawn(3)
    table = corners(cost)
    assert table is not None
    g = potential_near(mu, nu, cost, eps, table)
    rows = torch.softmax(nu.log().unsqueeze(-2) + (g.unsqueeze(-2) - cost) / eps, -1)
    assert torch.allclose((mu.unsqueeze(-2) @ rows).squeeze(-2), nu, atol=1e-9)


@pytest.mark.parametrize("points", [torch.arange(4.0).unsqueeze(1), torch.zeros(3, 2), torch.randn(7, 2)])
def test_labels_on_a_line_at_one_point_or_too_many_have_no_table_and_are_solved_all_the_same(
    points: torch.Tensor,
) -> None:
    cost = cost_matrix(points)
    assert corners(cost) is None
    mu, nu = drawn(len(points), 10)
    over = log_sinkhorn(mu, nu, cost, 1e-3) - torch.tensor(
        [ot.emd2(p, q, cost.numpy()) for p, q in zip(mu.numpy(), nu.numpy(), strict=True)]
    )
    assert over.min() > -1e-5
    assert over.max() < 1e-3 * math.log(len(points)) + 1e-5


def test_a_cost_that_is_no_metric_has_no_table() -> None:
    cost = generic(4)
    assert corners(cost + torch.eye(4)) is None
    assert corners(cost.triu()) is None
    far = cost.clone()
    far[0, 1] = far[1, 0] = 100.0
    assert corners(far) is None
