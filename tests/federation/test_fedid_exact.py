"""FedID with eq. 14, one round written out plainly: autograd through the central step instead of the chain rule."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fedstill.common.config import RunConfig
from fedstill.common.practice import Practice

from .conftest import Federation, streams
from .test_methods import flat, train_alone

Make = Callable[..., Federation]
Small = Callable[..., RunConfig]

EXACT = (
    "method.feedback=exact",
    "method.server_optimizer=sgd",
    "method.lambda=1/eta",
    "method.distill_epochs=1",
    "central.distill_rate=0.5",
    "data.partition=dirichlet-clients",
    "rounds=1",
    "report.alone=false",
    "report.centralized=false",
)
ETA = 0.5  # long enough a step that old and new weights are not the same thing


def plain_round(two: Federation, average: str, scale: float) -> None:
    """Algorithm 1 for one round of one epoch; the gradient of L_val goes through theta' to each site's prediction."""
    train_alone(two, 1, step=0)
    student, nodes = two.central, two.nodes
    model, calls = student.learner.model, 0
    sizes = [len(node.private) for node in nodes]
    weights = [size / sum(sizes) for size in sizes]
    sites = [torch.optim.AdamW(node.learner.parameters, lr=1e-3, weight_decay=0.0) for node in nodes]

    def at_central() -> AbstractContextManager[None]:
        nonlocal calls
        calls += 1
        return student.learner.at(1, calls - 1)

    def central(theta: dict[str, Tensor], batch: object) -> Tensor:
        found: Tensor = torch.func.functional_call(model, theta, (batch,))
        return found

    for i, start in enumerate(range(0, 40, 16)):
        rows = np.arange(start, min(start + 16, 40))
        said = []
        for node in nodes:  # 2a
            node.learner.model.eval()
            said.append(node.learner.model(node.public.batch(rows)))
        z = [s.detach().requires_grad_() for s in said]
        if average == "probabilities":
            y = weights[0] * z[0].softmax(-1) + weights[1] * z[1].softmax(-1)  # eq. 10
        else:
            y = (weights[0] * z[0] + weights[1] * z[1]).softmax(-1)
        theta = dict(model.named_parameters())
        with at_central(), sdpa_kernel(SDPBackend.MATH):
            model.train()
            loss = -(y * central(theta, student.public.batch(rows)).log_softmax(-1)).sum(-1).mean()
            gradient = torch.autograd.grad(loss, list(theta.values()), create_graph=True)
        moved = {n: p - ETA * g for (n, p), g in zip(theta.items(), gradient, strict=True)}  # eq. 11
        query = student.draw_labelled(len(rows), 1, i)
        with at_central(), sdpa_kernel(SDPBackend.MATH):
            model.eval()
            validation = F.cross_entropy(central(moved, student.labelled.batch(query)), student.labels[query])
        feedback = torch.autograd.grad(validation, z)  # eqs. 12 and 14, as far as the prediction
        with torch.no_grad():
            for name, parameter in theta.items():
                parameter.copy_(moved[name])
        for k in range(2):  # eqs. 13 and 15
            distil = -(y.detach() * said[k].log_softmax(-1)).sum(-1).mean()
            sites[k].zero_grad()
            (distil + scale * (feedback[k] * said[k]).sum()).backward()
            sites[k].step()


def apart(one: Federation, two: Federation) -> list[float]:
    """How far two federations' models are apart, central first."""
    pairs = [(one.central.learner, two.central.learner)]
    pairs += [(a.learner, b.learner) for a, b in zip(one.nodes, two.nodes, strict=True)]
    return [float((flat(a) - flat(b)).norm()) for a, b in pairs]


@pytest.mark.parametrize("average", ["probabilities", "logits"])
@pytest.mark.parametrize("jacobian", ["jvp", "difference"])
def test_a_round_with_exact_feedback_is_eq_15_written_out(
    federation: Make, small: Small, average: str, jacobian: str
) -> None:
    changes = (*EXACT, f"method.average={average}", f"method.jacobian={jacobian}")
    one, two, start = (federation(small(*changes)) for _ in range(3))
    without = federation(small(*changes, "method.lambda=0"))
    one.run()
    without.run()
    plain_round(two, average, scale=1 / ETA)
    assert len(one.nodes[0].private) != len(one.nodes[1].private)
    moved, wrong, effect = apart(one, start), apart(one, two), apart(one, without)
    for error, way, done in zip(wrong, moved, effect, strict=True):
        assert error < 1e-4 * way
        assert error < 1e-3 * done  # the feedback alone moved everybody, the central model by way of the sites


@pytest.mark.parametrize("jacobian", ["jvp", "difference"])
def test_feedback_through_a_living_adamw_is_autograd_with_its_second_moment_held(
    federation: Make, small: Small, jacobian: str
) -> None:
    made = federation(small("central.distill_rate=0.01"))
    student, model, practice = made.central, made.central.learner.model, Practice()
    rows, query, eta = np.arange(16), np.arange(8), 0.01
    said = np.random.default_rng(1).dirichlet([1.0, 1.0], 16).astype(np.float32)
    for _ in range(3):
        student.step(rows, said[::-1].copy(), practice)
    optimizer = student.learner.optimizer("distil", practice)
    theta = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    first = {name: optimizer.state[p]["exp_avg"].clone() for name, p in model.named_parameters()}
    place = student._place
    found, _ = student.step_with_feedback(rows, said, query, practice, eta, dropout=False, jacobian=jacobian)  # type: ignore[arg-type]

    second = {name: optimizer.state[p]["exp_avg_sq"] for name, p in model.named_parameters()}
    y = torch.from_numpy(said).requires_grad_()
    with sdpa_kernel(SDPBackend.MATH):
        with student.learner.at(*place):
            model.train()
            batch = student.public.batch(rows)
            loss = -(y * torch.func.functional_call(model, theta, (batch,)).log_softmax(-1)).sum(-1).mean()
            gradient = torch.autograd.grad(loss, list(theta.values()), create_graph=True)
        moved = {}
        for (name, before), g in zip(theta.items(), gradient, strict=True):  # step 4 of AdamW, by its definition
            mean = (0.9 * first[name] + 0.1 * g) / (1 - 0.9**4)
            moved[name] = before - eta * mean / ((second[name] / (1 - 0.999**4)).sqrt() + 1e-8)
        for name, parameter in model.named_parameters():
            assert torch.allclose(moved[name], parameter, atol=1e-6)
        model.eval()
        logits = torch.func.functional_call(model, moved, (student.labelled.batch(query),))
        wanted = torch.autograd.grad(F.cross_entropy(logits, student.labels[query]), y)[0]
    assert float(wanted.norm()) > 1e-3
    assert float((found - wanted).norm() / wanted.norm()) < (1e-3 if jacobian == "jvp" else 2e-2)


def test_one_matrix_goes_to_all_sites_over_real_streams(federation: Make, small: Small) -> None:
    one, two = federation(small(*EXACT)), federation(small(*EXACT))
    asked: dict[str, list[np.ndarray]] = {}
    shares: dict[str, float] = {}
    for node in one.nodes:
        honest = node.answer

        def answer(ask, node=node, honest=honest):  # type: ignore[no-untyped-def]
            if ask.verb == "train.feedback":
                asked.setdefault(node.name, []).append(ask.arrays["feedback"].copy())
                shares[node.name] = ask.settings["weight"]
            return honest(ask)

        node.answer = answer  # type: ignore[method-assign]
    one.run()
    north, south = asked["north"], asked["south"]
    assert [m.shape for m in north] == [(16, 2), (16, 2), (8, 2)]
    assert all(np.array_equal(a, b) for a, b in zip(north, south, strict=True))
    assert sum(shares.values()) == pytest.approx(1.0)
    assert shares["north"] != shares["south"]
    with streams(two) as link:
        two.run(link)
    assert one.weights() == two.weights()


def test_scalar_eval_measures_h_without_dropout_and_scalar_with_it(federation: Make, small: Small) -> None:
    """With a central rate of almost nothing h is rounding in eval mode, and the noise of two masks in train mode."""
    found = {}
    for mode in ("scalar", "scalar_eval"):
        made = federation(small("rounds=1", f"method.feedback={mode}", "method.dropout=true", "method.distill_epochs=1",
                                "central.distill_rate=1e-12"))  # fmt: skip
        heard: list[float] = []
        honest = made.nodes[0].answer
        made.nodes[0].answer = lambda ask, heard=heard, honest=honest: (  # type: ignore[method-assign,misc]
            heard.append(ask.settings.get("h", 0.0)),
            honest(ask),
        )[1]
        made.run()
        found[mode] = max(abs(h) for h in heard)
    assert found["scalar_eval"] < 1e-5 < 1e-4 < found["scalar"]


def test_feedback_without_labelled_texts_is_refused(federation: Make, small: Small) -> None:
    with pytest.raises(ValueError, match=r"data.labelled is 0; give it some, or set method.feedback"):
        federation(small("data.labelled=0"))
