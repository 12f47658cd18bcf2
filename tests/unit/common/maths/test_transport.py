"""Transport against POT's exact solver, finite differences, and what must hold for any cost."""

from __future__ import annotations

import math
import warnings

import numpy as np
import ot
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedstill.common.data.tasks import INFERENCE_TRIANGLE, VALENCE_AROUSAL, on_a_line
from fedstill.common.maths.transport import (
    SOLVERS,
    cost_matrix,
    default_solver,
    geomloss_sinkhorn,
    log_sinkhorn,
    positions_on_line,
    w1_1d,
)

SUPPORTS = {
    "stars": torch.tensor(on_a_line(5)),
    "emotions": torch.tensor(list(VALENCE_AROUSAL.values())),
    "inference": torch.tensor(list(INFERENCE_TRIANGLE.values())),
    "one-hot": torch.eye(5),
    "twelve in space": torch.randn(12, 3, generator=torch.Generator().manual_seed(1)),
}
probabilities = st.lists(st.floats(0.0, 1.0), min_size=5, max_size=5).filter(lambda p: sum(p) > 0.1)


def draw(classes: int, texts: int = 200, concentration: float = 0.5, seed: int = 0) -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng(seed)
    p, q = rng.dirichlet(np.full(classes, concentration), size=(2, texts))
    return torch.from_numpy(p), torch.from_numpy(q)


def exact(mu: Tensor, nu: Tensor, points: Tensor) -> Tensor:
    cost = ot.dist(points.double().numpy(), metric="euclidean")
    values = [ot.emd2(p, q, cost) for p, q in zip(mu.numpy(), nu.numpy(), strict=True)]
    return torch.tensor(values, dtype=torch.float64)


def distribution(values: list[float]) -> Tensor:
    p = torch.tensor([values], dtype=torch.float64)
    return p / p.sum()


def test_the_cost_of_the_papers_tasks() -> None:
    assert torch.allclose(cost_matrix(SUPPORTS["stars"])[0], torch.arange(5.0, dtype=torch.float64))
    assert cost_matrix(SUPPORTS["one-hot"])[0, 1] == pytest.approx(math.sqrt(2))
    inference = cost_matrix(SUPPORTS["inference"])
    assert inference[0, 2] == pytest.approx(math.sqrt(2))  # entailment to contradiction: (1, 0, -1)
    assert inference[0, 1] == inference[1, 2] == pytest.approx(math.sqrt(1.5))  # to neutral: (.5, -1, -.5)


def test_on_a_line_by_hand() -> None:
    mu, nu = torch.tensor([[1.0, 0.0, 0.0]]), torch.tensor([[0.25, 0.25, 0.5]])
    assert w1_1d(mu, nu, torch.tensor([[0.0], [1.0], [3.0]])).item() == pytest.approx(0.25 * 1 + 0.5 * 3)


@pytest.mark.parametrize("concentration", [0.05, 0.5, 5.0])
def test_w1_on_a_line_is_exact(concentration: float) -> None:
    mu, nu = draw(5, concentration=concentration)
    for points in (torch.tensor([[3.0], [-1.0], [0.5], [9.0], [2.0]]), torch.tensor(on_a_line(5)) * torch.ones(1, 3)):
        assert torch.allclose(w1_1d(mu, nu, points), exact(mu, nu, points), atol=1e-6)


@pytest.mark.parametrize("concentration", [0.01, 0.05, 0.5])
@pytest.mark.parametrize("support", SUPPORTS)
def test_entropic_transport_is_exact_but_for_its_entropy(support: str, concentration: float) -> None:
    points = SUPPORTS[support]
    mu, nu = draw(len(points), concentration=concentration)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = log_sinkhorn(mu, nu, cost_matrix(points), 1e-3)
    over = found - exact(mu, nu, points)
    # eps KL(pi || mu x nu) is between 0 and eps log C; a marginal within 1e-6 costs at most diameter x 1e-6 more.
    assert over.min() > -1e-5
    assert over.max() < 1e-3 * math.log(len(points)) + 1e-5
    if len(points) <= 5:
        assert over.abs().mean() < 1e-3


@pytest.mark.parametrize("eps", [1e-4, 1e-3, 0.1, 16.0])
def test_entropic_transport_agrees_with_pots_own(eps: float) -> None:
    mu, nu = draw(5, texts=20, concentration=2.0)
    cost = cost_matrix(SUPPORTS["stars"])
    found = log_sinkhorn(mu, nu, cost, eps, tol=1e-9)
    if eps < 0.1:  # POT's iterations do not end here; the limit of no entropy bounds the value
        over = found - exact(mu, nu, SUPPORTS["stars"])
        assert (over > -1e-7).all()
        assert (over < eps * math.log(5)).all()
        return
    for p, q, value in zip(mu.numpy(), nu.numpy(), found, strict=True):
        plan = ot.sinkhorn(p, q, cost.numpy(), eps, method="sinkhorn_log", numItermax=100_000, stopThr=1e-12)
        outer = np.outer(p, q)
        assert value.item() == pytest.approx((plan * cost.numpy()).sum() + eps * (plan * np.log(plan / outer)).sum())


@pytest.mark.parametrize("support", SUPPORTS)
@pytest.mark.parametrize("eps", [1e-3, 0.1, 1.0])
def test_the_gradient_is_that_of_finite_differences_along_the_simplex(support: str, eps: float) -> None:
    points = SUPPORTS[support]
    mu, nu = draw(len(points), texts=40, concentration=2.0)
    cost, step = cost_matrix(points), 1e-6
    value = log_sinkhorn(mu.requires_grad_(), nu, cost, eps, tol=1e-10)
    (gradient,) = torch.autograd.grad(value.sum(), mu)
    assert gradient.sum(-1).abs().max() < 1e-9
    mu = mu.detach()
    for i in range(1, len(points)):  # from label 0 to label i
        way = torch.zeros(len(points), dtype=torch.float64)
        way[0], way[i] = -1.0, 1.0
        ends = [log_sinkhorn(mu + sign * step * way, nu, cost, eps, tol=1e-10) for sign in (1, -1)]
        assert torch.allclose((ends[0] - ends[1]) / (2 * step), gradient[:, i] - gradient[:, 0], atol=1e-3)


def test_the_gradient_through_softmax_is_that_of_logits() -> None:
    logits = torch.randn(6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(3), requires_grad=True)
    nu, cost = draw(5, texts=6)[1], cost_matrix(SUPPORTS["emotions"])
    assert torch.autograd.gradcheck(lambda z: log_sinkhorn(z.softmax(-1), nu, cost, 0.05, tol=1e-12), logits, atol=1e-5)


def test_sure_answers_have_values_and_gradients() -> None:
    mu = torch.tensor([[1.0, 0, 0, 0, 0], [0, 0, 1.0, 0, 0]], requires_grad=True)
    nu = torch.tensor([[0.0, 0, 0, 0, 1.0], [0, 0, 1.0, 0, 0]])
    value = log_sinkhorn(mu, nu, cost_matrix(SUPPORTS["stars"]), 1e-3)
    assert torch.allclose(value, torch.tensor([4.0, 0.0]), atol=1e-4)
    value.sum().backward()
    assert mu.grad is not None
    # Mass on label i has |5 - i|, or |3 - i|, to go.
    assert torch.allclose(mu.grad[0], torch.tensor([2.0, 1.0, 0.0, -1.0, -2.0]), atol=1e-2)
    assert torch.allclose(mu.grad[1] - mu.grad[1, 2], torch.tensor([2.0, 1.0, 0.0, 1.0, 2.0]), atol=1e-2)


@settings(max_examples=60, deadline=None)
@given(probabilities, probabilities, st.sampled_from([1e-3, 0.03, 1.0]), st.floats(0.01, 100.0))
def test_symmetry_and_scaling(p: list[float], q: list[float], eps: float, factor: float) -> None:
    mu, nu = distribution(p), distribution(q)
    cost = cost_matrix(SUPPORTS["emotions"])
    value = log_sinkhorn(mu, nu, cost, eps, tol=1e-9)
    assert value.item() == pytest.approx(log_sinkhorn(nu, mu, cost, eps, tol=1e-9).item(), abs=1e-7)
    assert log_sinkhorn(mu, nu, factor * cost, factor * eps, tol=1e-9).item() == pytest.approx(
        factor * value.item(), abs=1e-7 * factor
    )
    line = SUPPORTS["stars"].double()
    assert w1_1d(mu, nu, line).item() == pytest.approx(w1_1d(nu, mu, line).item())
    assert w1_1d(mu, nu, factor * line + 7).item() == pytest.approx(factor * w1_1d(mu, nu, line).item(), rel=1e-6)
    assert w1_1d(mu, mu, line).item() == 0


def test_geomloss_is_on_the_way_to_the_exact_value_and_nearer_when_it_anneals_slowly() -> None:
    points = SUPPORTS["stars"]
    mu, nu = (x.float() for x in draw(5))
    truth = exact(
        mu.double() / mu.double().sum(-1, keepdim=True), nu.double() / nu.double().sum(-1, keepdim=True), points
    )
    quick, slow = (
        (geomloss_sinkhorn(mu, nu, points, blur=1e-3, scaling=scaling) - truth).abs().mean() for scaling in (0.5, 0.9)
    )
    assert slow < quick / 3
    assert slow < 0.05


def test_solvers_take_any_number_of_teachers() -> None:
    mu, nu = (x.float().view(4, 50, 5) for x in draw(5))
    for name, solve in SOLVERS.items():
        found = solve(mu, nu, SUPPORTS["stars"], 1e-3)
        assert found.shape == (4, 50), name
        assert torch.allclose(found[2], solve(mu[2], nu[2], SUPPORTS["stars"], 1e-3), atol=1e-5), name


def test_the_solver_follows_from_the_support() -> None:
    assert default_solver(SUPPORTS["stars"]) == "w1_1d"
    assert default_solver(torch.eye(2)) == "w1_1d"  # two points always have a line
    assert default_solver(SUPPORTS["emotions"]) == default_solver(torch.eye(3)) == "log_sinkhorn"
    slanted = positions_on_line(torch.tensor([[1.0, 1.0], [4.0, 5.0], [2.5, 3.0]]))
    assert slanted is not None
    assert torch.allclose(slanted, torch.tensor([0.0, 5.0, 2.5], dtype=torch.float64))


def test_what_cannot_be_solved_says_so() -> None:
    mu, nu = draw(5, texts=8)
    with pytest.raises(ValueError, match=r"w1_1d needs labels on one line.*log_sinkhorn"):
        w1_1d(mu, nu, SUPPORTS["emotions"])
    with pytest.raises(ValueError, match="eps = 0 must be above 0"):
        log_sinkhorn(mu, nu, cost_matrix(SUPPORTS["stars"]), 0)
    with pytest.warns(UserWarning, match="texts are not within 1e-06 after 2 steps"):
        log_sinkhorn(mu, nu, cost_matrix(SUPPORTS["stars"]), 1e-3, most_steps=2)
