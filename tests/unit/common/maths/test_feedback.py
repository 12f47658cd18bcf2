"""FedID's exact feedback against autograd through the central step and everything before it, in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from fedstill.common.config import ConfigError, MethodConfig, ModelConfig, TaskConfig
from fedstill.common.data.tasks import load_task
from fedstill.common.maths.feedback import (
    central_difference,
    directional_derivative,
    exact_feedback,
    exact_surrogate,
    forward_mode,
    scalar_surrogate,
    through_softmax,
)
from fedstill.common.models.loading import load_model
from fedstill.strategies import find_method

ETA, SHARES, CLASSES, TEXTS = 0.3, (0.5, 0.3, 0.2), 3, 6
Server = tuple[dict[str, Tensor], Callable[[dict[str, Tensor]], Tensor], Callable[[dict[str, Tensor]], Tensor]]


def mlp(width: int, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, CLASSES)).double()


def small_server() -> Server:
    """Weights, and the logits that they give on six public and on four labelled texts."""
    net = mlp(8, seed=1)
    public, labelled = torch.randn(TEXTS, 5).double(), torch.randn(4, 5).double()
    theta = {name: value.detach() for name, value in net.named_parameters()}
    call = torch.func.functional_call
    return theta, lambda at: call(net, at, (public,)), lambda at: call(net, at, (labelled,))


def bert_server() -> Server:
    task, pools = load_task(TaskConfig())
    model = load_model(ModelConfig(name="tiny-bert", max_length=8), task, seed=3)
    texts = model.encode(pools.train.texts[: TEXTS + 4])
    torch.manual_seed(5)
    model.net.classifier = nn.Linear(128, CLASSES)  # the film reviews have two
    net = model.net.double().eval()
    theta = {name: value.detach() for name, value in net.named_parameters()}

    def on(rows: np.ndarray) -> Callable[[dict[str, Tensor]], Tensor]:
        batch = texts.batch(rows)
        return lambda at: torch.func.functional_call(net, at, (), batch).logits

    return theta, on(np.arange(TEXTS)), on(np.arange(TEXTS, TEXTS + 4))


SERVERS: dict[str, Callable[[], Server]] = {"mlp": small_server, "tiny-bert": bert_server}
LABELS = torch.tensor([0, 2, 1, 1])


def ensemble(said: list[Tensor], average: str) -> Tensor:
    if average == "probabilities":
        return sum((w * z.softmax(-1) for w, z in zip(SHARES, said, strict=True)), torch.zeros(()))
    return sum((w * z for w, z in zip(SHARES, said, strict=True)), torch.zeros(())).softmax(-1)


def two_levels(server: Server, said: list[Tensor], average: str) -> Tensor:
    """L_val after one gradient step on the ensemble, as a function of the sites' logits: eqs. 10, 11 and 12."""
    theta, on_public, on_labelled = server
    start = {name: value.clone().requires_grad_() for name, value in theta.items()}
    loss = -(ensemble(said, average) * on_public(start).log_softmax(-1)).sum(-1).mean()
    gradient = torch.autograd.grad(loss, list(start.values()), create_graph=True, allow_unused=True)
    moved = {
        name: value if g is None else value - ETA * g for (name, value), g in zip(start.items(), gradient, strict=True)
    }
    return F.cross_entropy(on_labelled(moved), LABELS)


def directions(server: Server, y: Tensor) -> tuple[Callable[[dict[str, Tensor]], Tensor], dict[str, Tensor]]:
    """log f(x0; theta) and v, the gradient of L_val at the new weights."""
    theta, on_public, on_labelled = server

    def gradient(loss: Callable[[dict[str, Tensor]], Tensor], at: dict[str, Tensor]) -> dict[str, Tensor]:
        return torch.func.grad(loss)(at)

    step = gradient(lambda at: -(y * on_public(at).log_softmax(-1)).sum(-1).mean(), theta)
    moved = {name: value - ETA * step[name] for name, value in theta.items()}
    v = gradient(lambda at: F.cross_entropy(on_labelled(at), LABELS), moved)
    return lambda at: on_public(at).log_softmax(-1), v


@contextmanager
def twice_differentiable() -> Iterator[None]:
    with sdpa_kernel(SDPBackend.MATH):
        yield


def site_gradients(loss: Tensor, sites: list[nn.Module]) -> Tensor:
    found = torch.autograd.grad(loss, [p for site in sites for p in site.parameters()])
    return torch.cat([g.flatten() for g in found])


@pytest.mark.parametrize("average", ["probabilities", "logits"])
@pytest.mark.parametrize("kind", SERVERS)
@pytest.mark.parametrize(("how", "close"), [("jvp", 1e-8), ("difference", 1e-6)])
def test_the_surrogate_has_the_gradient_of_eq_15(kind: str, average: str, how: str, close: float) -> None:
    server = SERVERS[kind]()
    sites = [mlp(4 + k, seed=10 + k) for k in range(3)]
    texts = torch.randn(TEXTS, 5).double()
    with twice_differentiable():
        said = [site(texts) for site in sites]
        y = ensemble(said, average).detach()
        wanted = site_gradients(two_levels(server, said, average), sites)  # eq. 14

        said = [site(texts) for site in sites]
        log_f, v = directions(server, y)
        matrix = exact_feedback(directional_derivative(log_f, server[0], v, how), ETA)  # type: ignore[arg-type]
    if average == "logits":
        matrix = through_softmax(matrix, y)
    terms = [w * exact_surrogate(z, matrix, average) for w, z in zip(SHARES, said, strict=True)]
    found = site_gradients(torch.stack(terms).sum(), sites)
    assert wanted.norm() > 1e-6
    assert (found - wanted).norm() <= close * wanted.norm()


def test_the_matrix_says_by_hand_what_one_step_of_one_weight_does() -> None:
    """f = softmax(theta, 0) on one text, L_val = -log f_0 of the same model: every derivative is known."""
    theta, y0, eta = 0.4, 0.25, 0.1

    def log_f(at: dict[str, Tensor]) -> Tensor:
        return torch.stack([at["w"], torch.zeros_like(at["w"])], dim=-1).log_softmax(-1)

    p = 1 / (1 + np.exp(-theta))
    moved = theta - eta * (p - y0)
    v = 1 / (1 + np.exp(-moved)) - 1  # d(-log f_0) / dw at the new weight
    by_hand = eta * v * np.array([1 - p, -p])  # d log f / dw = (1 - p, -p)
    at, along = {"w": torch.tensor([theta]).double()}, {"w": torch.tensor([v]).double()}
    assert np.allclose(exact_feedback(forward_mode(log_f, at, along), eta)[0], by_hand, rtol=1e-12)
    assert np.allclose(exact_feedback(central_difference(log_f, at, along), eta)[0], by_hand, rtol=1e-8)
    assert by_hand[0] < 0 < by_hand[1]  # more of the true class in y lowers the loss: the site is led towards it


def test_to_first_order_h_is_a_summary_of_the_matrix() -> None:
    """h = L_val(theta) - L_val(theta') = -<y, G>, with an error that falls with eta."""
    server = small_server()
    theta, on_public, on_labelled = server
    y = torch.full((TEXTS, CLASSES), 1 / CLASSES).double()
    log_f = lambda at: on_public(at).log_softmax(-1)  # noqa: E731
    val = lambda at: F.cross_entropy(on_labelled(at), LABELS)  # noqa: E731
    step = torch.func.grad(lambda at: -(y * log_f(at)).sum(-1).mean())(theta)
    errors = []
    for eta in (1e-3, 1e-4):
        moved = {name: value - eta * step[name] for name, value in theta.items()}
        h = val(theta) - val(moved)
        matrix = exact_feedback(forward_mode(log_f, theta, torch.func.grad(val)(moved)), eta)
        errors.append(float((h + (y * matrix).sum()).abs() / h.abs()))
    assert errors[0] < 0.05
    assert errors[1] < 0.2 * errors[0]


def test_auto_differences_where_there_is_no_forward_derivative() -> None:
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x * x

        @staticmethod
        def backward(ctx: object, *grads: Tensor) -> Tensor:
            raise NotImplementedError

    def predict(at: dict[str, Tensor]) -> Tensor:
        return Square.apply(at["w"])  # type: ignore[no-any-return, no-untyped-call]

    at, along = {"w": torch.tensor([[3.0]]).double()}, {"w": torch.tensor([[2.0]]).double()}
    with pytest.warns(UserWarning, match="central difference"):
        assert torch.allclose(directional_derivative(predict, at, along), torch.tensor([[12.0]]).double())
    with pytest.raises(RuntimeError, match=r"set method.jacobian = 'auto'"):
        directional_derivative(predict, at, along, "jvp")


def test_scalar_feedback_by_hand() -> None:
    logits = torch.log(torch.tensor([[0.8, 0.2], [0.3, 0.7]]))
    assert float(scalar_surrogate(logits, 0.5)) == pytest.approx(0.5 * -(np.log(0.8) + np.log(0.7)) / 2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"feedback": "exact", "optimizer_state": "fresh"}, "set optimizer_state = 'persistent'"),
        ({"feedback": "exact", "aggregation": "median"}, "set aggregation = 'mean'"),
        ({"feedback": "none", "distil": False}, "nothing to learn"),
        ({"feedback": "exact", "lambda": "1/eta"}, "leave lambda at 1"),
        ({"feedback": "scalar", "lambda": "1/eta"}, "leave lambda at 1"),
        ({"feedback": "scalar_eval", "lambda": "1/eta"}, "leave lambda at 1"),
        ({"distill_dropout": True}, "set dropout instead"),
        ({"lambda": -1.0}, "greater than or equal to 0"),
        ({"lambda": "eta"}, "1/eta"),
    ],
)
def test_what_does_not_go_together_is_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_method(MethodConfig.model_validate({"name": "fedid", **settings}))


def test_lambda_is_a_number_or_one_over_eta() -> None:
    steep = {"lambda": "1/eta", "server_optimizer": "sgd"}
    assert find_method(MethodConfig.model_validate(steep))[1].model_dump(by_alias=True)["lambda"] == "1/eta"
    assert find_method(MethodConfig.model_validate({}))[1].model_dump(by_alias=True)["lambda"] == 1.0
