"""Each method against its paper written out plainly, on real models."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fedstill.common.config import RunConfig
from fedstill.common.config.files import load_run
from fedstill.common.models.learner import Learner
from fedstill.common.practice import Practice
from tests.conftest import SMALL

from .conftest import Federation, precise

Make = Callable[..., Federation]
Small = Callable[..., RunConfig]


def flat(learner: Learner) -> Tensor:
    return torch.cat([p.detach().flatten() for p in learner.parameters])


def train_alone(federation: Federation, epochs: int, step: int, number: int = 1) -> None:
    """Step 1 of a round, node by node, as the method's first Ask has it done."""
    for node in federation.nodes:
        with node.learner.at(number, step):
            node.train_privately(epochs, Practice())


def test_fedavg_is_the_mean_by_size_of_what_the_sites_trained(federation: Make, small: Small) -> None:
    changes = ("method.name=fedavg", "rounds=1", "sites.south.model=tiny-bert", "data.partition=dirichlet-clients")
    one, two = federation(precise(small(*changes))), federation(precise(small(*changes)))
    one.run()
    theta = two.central.weights()
    for node in two.nodes:
        node.learner.load_weights(theta)
        with node.learner.at(1, 0):
            node.train_privately(1, Practice(fresh=True))
    sizes = [len(node.private) for node in two.nodes]
    assert sizes[0] != sizes[1]
    states = [node.learner.weights() for node in two.nodes]
    for name, value in one.central.weights().items():
        mean = (sizes[0] * states[0][name].astype(np.float64) + sizes[1] * states[1][name]) / sum(sizes)
        assert np.allclose(value, mean, atol=1e-12), name
    assert one.events("round_finished")[0]["metrics"]["loss"] > 0


def test_rates_fall_to_zero_over_the_run_where_nobody_says_otherwise(federation: Make) -> None:
    settings = precise(load_run(SMALL.replace('schedule = "constant"\n', ""), ("method.name=isolated",)))
    assert settings.rounds == 2
    one, two = federation(settings), federation(settings)
    one.run()
    for node, trained in zip(two.nodes, one.nodes, strict=True):
        for number, decay in ((1, (0.0, 0.5)), (2, (0.5, 1.0))):
            with node.learner.at(number, 0):
                node.train_privately(1, Practice(decay=decay))
        assert torch.equal(flat(node.learner), flat(trained.learner))


def test_config_toml_lists_the_rates_that_were_used_and_reads_as_before(federation: Make, small: Small) -> None:
    made = federation(small("method.name=ds-fl", "rounds=1"))
    made.run()
    text = (made.folder / "run/config.toml").read_text()
    assert text.count("# Rates as resolved") == 1
    central = "# central: learning 0.001, distillation 0.001, interaction 0.001, warm-up 0, fall 1\n"
    assert f"{central}# north: learning 0.001" in text
    assert load_run(made.folder / "run/config.toml") == made.config


@pytest.mark.parametrize(
    ("changes", "cure"),
    [
        (("train.warmup=0.1",), "set method.schedule to run, phase or call, or take train.warmup out"),
        (("train.fall=0.1",), "set method.schedule to run, phase or call, or take train.fall out"),
        (("method.name=sinkhorn", "method.eps=0.1"), "take eps out, or set method.solver = 'log_sinkhorn'"),
    ],
)
def test_a_setting_that_would_do_nothing_is_refused(
    federation: Make, small: Small, changes: tuple[str, ...], cure: str
) -> None:
    with pytest.raises(ValueError, match=cure):
        federation(small(*changes))


def test_fedavg_refuses_different_models(federation: Make, small: Small) -> None:
    with pytest.raises(ValueError, match=r"exchanges weights, so .* must be the same model.*tiny-roberta"):
        federation(small("method.name=fedavg")).run()


def test_dsfl_sharpens_the_mean_of_probabilities_and_everybody_distils_it(federation: Make, small: Small) -> None:
    changes = ("method.name=ds-fl", "rounds=1", "method.distill_epochs=2", "method.temperature=0.5",
               "method.distill_dropout=true")  # fmt: skip
    one, two = federation(precise(small(*changes))), federation(precise(small(*changes)))
    one.run()
    train_alone(two, 1, step=0)
    rows = np.arange(40)
    with torch.no_grad():
        probabilities = []
        for node in two.nodes:
            node.learner.model.eval()
            probabilities.append(F.softmax(node.learner.model(node.public.batch(rows)), dim=-1))
        target = F.softmax(torch.stack(probabilities).mean(dim=0) / 0.5, dim=-1)
    two.central.begin_round(1)
    two.central.distil(rows, target.numpy(), "soft", 2, Practice())
    assert torch.allclose(flat(one.central.learner), flat(two.central.learner), atol=1e-9)
    for node, other in zip(one.nodes, two.nodes, strict=True):
        with other.learner.at(1, 2):
            other.learner.fit(
                other.public,
                rows,
                lambda z, i: -(target[i] * z.log_softmax(-1)).sum(-1).mean(),
                2,
                "distil",
                Practice(),
            )
        assert torch.allclose(flat(node.learner), flat(other.learner), atol=1e-9)


def plain_fedid(two: Federation, *, authors: bool, feedback: bool) -> None:
    """Algorithm 1 of the paper, or what the authors run, written out for one round with one epoch."""
    train_alone(two, 1, step=0)
    student, nodes = two.central, two.nodes
    weights = np.array([len(node.private) for node in nodes], np.float64)
    weights /= weights.sum()
    central = torch.optim.AdamW(student.learner.parameters, lr=1e-3, weight_decay=0.0)
    sites = [torch.optim.AdamW(node.learner.parameters, lr=1e-3, weight_decay=0.0) for node in nodes]
    central_calls = 0

    def at_central() -> object:
        nonlocal central_calls
        central_calls += 1
        return student.learner.at(1, central_calls - 1)

    for i, start in enumerate(range(0, 40, 16)):
        rows = np.arange(start, min(start + 16, 40))
        said = []
        for node in nodes:  # 2a
            with node.learner.at(1, 1 + i):
                node.learner.model.train(authors)
                said.append(node.learner.model(node.public.batch(rows)))
        z = [s.detach() for s in said]
        if authors:
            y = F.softmax(sum(w * s for w, s in zip(weights, z, strict=True)), dim=-1)
            target = sum(w * F.one_hot(s.argmax(-1), 2).double() for w, s in zip(weights, z, strict=True))
        else:
            y = target = sum(w * F.softmax(s, dim=-1) for w, s in zip(weights, z, strict=True))  # eq. 10
        h = 0.0
        query = student.draw_labelled(len(rows), 1, i)

        def validation(query: np.ndarray = query) -> float:
            with at_central(), torch.no_grad():  # type: ignore[attr-defined]
                student.learner.model.train(authors)
                return F.cross_entropy(
                    student.learner.model(student.labelled.batch(query)), student.labels[query]
                ).item()

        h = validation() if feedback else 0.0
        if authors:
            central = torch.optim.AdamW(student.learner.parameters, lr=1e-3, weight_decay=0.0)
        with at_central():  # type: ignore[attr-defined]
            student.learner.model.train()
            guess = student.learner.model(student.public.batch(rows)).log_softmax(-1)
            central.zero_grad()
            (-(target * guess).sum(-1).mean()).backward()  # eq. 11
            central.step()
        h = h - validation() if feedback else 0.0  # eq. 12, as a difference
        for k, node in enumerate(nodes):  # 2f, eqs. 13 to 15
            if authors:
                sites[k] = torch.optim.AdamW(node.learner.parameters, lr=1e-3, weight_decay=0.0)
                loss = F.cross_entropy(said[k], y.argmax(-1))
            else:
                loss = -(y * said[k].log_softmax(-1)).sum(-1).mean()
            loss = loss + weights[k] * h * F.cross_entropy(said[k], z[k].argmax(-1))
            sites[k].zero_grad()
            loss.backward()
            sites[k].step()


@pytest.mark.parametrize("authors", [False, True], ids=["paper", "authors_code"])
@pytest.mark.parametrize("feedback", [False, True], ids=["none", "scalar"])
def test_fedid_is_its_algorithm_written_out(federation: Make, small: Small, authors: bool, feedback: bool) -> None:
    preset, mode = "authors_code" if authors else "paper", "scalar" if feedback else "none"
    changes = [f"method.preset={preset}", f"method.feedback={mode}", "rounds=1", "method.distill_epochs=1"]
    if authors:
        changes += ["method.schedule=constant", "method.optimizer_state=fresh"]
    one, two = federation(precise(small(*changes))), federation(precise(small(*changes)))
    one.run()
    plain_fedid(two, authors=authors, feedback=feedback)
    sizes = {node.name: len(node.private) for node in two.nodes}
    told = one.events("weights")
    assert [event["round"] for event in told] == [1]
    assert told[0]["weights"] == {name: size / sum(sizes.values()) for name, size in sizes.items()}
    assert torch.allclose(flat(one.central.learner), flat(two.central.learner), atol=1e-9)
    for node, other in zip(one.nodes, two.nodes, strict=True):
        assert torch.allclose(flat(node.learner), flat(other.learner), atol=1e-9)


def test_scalar_feedback_changes_the_sites(federation: Make, small: Small) -> None:
    ends = []
    for mode in ("none", "scalar"):
        made = federation(small(f"method.feedback={mode}", "rounds=1"))
        made.run()
        ends.append(flat(made.nodes[0].learner))
    assert not torch.equal(ends[0], ends[1])


def test_one_frame_carries_the_feedback_and_the_next_rows(federation: Make, small: Small) -> None:
    made = federation(small("rounds=1", "method.distill_epochs=1"))
    asked: list[tuple[str, list[str]]] = []
    node = made.nodes[0]
    honest = node.answer
    node.answer = lambda ask: (asked.append((ask.verb, sorted(ask.arrays))), honest(ask))[1]  # type: ignore[method-assign]
    made.run()
    talk = [(verb, names) for verb, names in asked if verb in ("query.logits", "train.feedback")]
    both, last = ["answered", "ensemble", "rows"], ["answered", "ensemble"]
    assert talk == [("query.logits", ["rows"])] + [("train.feedback", both)] * 2 + [("train.feedback", last)]


def test_participation_is_drawn_from_the_seed(federation: Make, small: Small) -> None:
    seen = []
    for _ in range(2):
        made = federation(small("method.participation=0.5", "rounds=4", "method.distill_epochs=1"))
        made.run()
        seen.append([tuple(event["sites"]) for event in made.events("round_started")])
    assert seen[0] == seen[1]
    assert all(len(sites) == 1 for sites in seen[0])
    assert len(set(seen[0])) == 2
