"""Each baseline against its paper written out plainly, on real models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fedstill.client.node import Node
from fedstill.common.config import RunConfig
from fedstill.common.models.learner import Learner
from fedstill.common.models.tokens import Encoded
from fedstill.common.wire import Ask, Reply, WireError
from fedstill.server.central import CentralModel

from .conftest import Federation, precise, spoil, with_nan
from .test_methods import flat

Make = Callable[..., Federation]
Small = Callable[..., RunConfig]
Loss = Callable[[Tensor, np.ndarray], Tensor]

QUICK = ("rounds=1", "data.partition=dirichlet-clients", "report.alone=false", "report.centralized=false")
ROWS = np.arange(40)


@pytest.fixture
def pair(federation: Make, small: Small) -> Callable[..., tuple[Federation, Federation]]:
    """The same federation twice: one to run, one to write out."""

    def make(name: str, *changes: str) -> tuple[Federation, Federation]:
        config = precise(small(f"method.name={name}", *QUICK, "method.distill_dropout=true", *changes))
        return federation(config), federation(config)

    return make


def adamw(learner: Learner) -> torch.optim.Optimizer:
    return torch.optim.AdamW(learner.parameters, lr=1e-3, weight_decay=0.0)


def train(
    learner: Learner,
    place: tuple[int, int],
    texts: Encoded,
    rows: np.ndarray,
    loss: Loss,
    optimizer: torch.optim.Optimizer | None = None,
    falls: float = 0.0,
) -> torch.optim.Optimizer:
    """One epoch of mini-batches of 16, shuffled by the seed of its place; the rate falls linearly by `falls`."""
    optimizer = optimizer or adamw(learner)
    with learner.at(*place):
        order = torch.randperm(len(rows)).numpy()
        batches = [order[start : start + 16] for start in range(0, len(rows), 16)]
        learner.model.train()
        for i, places in enumerate(batches):
            optimizer.param_groups[0]["lr"] = 1e-3 * (1 - falls * i / len(batches))
            optimizer.zero_grad()
            loss(learner.model(texts.batch(rows[places])), places).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return optimizer


def privately(node: Node, step: int, optimizer: Any = None, falls: float = 0.0) -> torch.optim.Optimizer:
    return train(
        node.learner, (1, step), node.private, np.arange(len(node.private)),
        lambda z, i: F.cross_entropy(z, node.labels[i]), optimizer, falls,
    )  # fmt: skip


def on_public(who: Node | CentralModel, step: int, loss: Loss, falls: float = 0.0) -> None:
    train(who.learner, (1, step), who.public, ROWS, loss, None, falls)


def say(who: Node | CentralModel) -> Tensor:
    who.learner.model.eval()
    with torch.no_grad():
        found: Tensor = who.learner.model(who.public.batch(ROWS))
    return found


def shares(made: Federation) -> list[float]:
    sizes = [len(node.private) for node in made.nodes]
    assert sizes[0] != sizes[1]
    return [size / sum(sizes) for size in sizes]


def soft(targets: Tensor) -> Loss:
    return lambda z, i: -(targets[i] * z.log_softmax(-1)).sum(-1).mean()


def kl(targets: Tensor) -> Loss:
    return lambda z, i: (targets[i] * (targets[i].log() - z.log_softmax(-1))).sum(-1).mean()


def hard(targets: Tensor) -> Loss:
    return lambda z, i: F.cross_entropy(z, targets.argmax(-1)[i])


def weigh(weights: Any, parts: list[Tensor]) -> Tensor:
    return torch.stack([w * part for w, part in zip(weights, parts, strict=True)]).sum(dim=0)


def assert_same(one: Federation, two: Federation, atol: float = 1e-9) -> None:
    assert torch.allclose(flat(one.central.learner), flat(two.central.learner), atol=atol)
    for node, other in zip(one.nodes, two.nodes, strict=True):
        assert torch.allclose(flat(node.learner), flat(other.learner), atol=atol), node.name


# --- FedKD ---------------------------------------------------------------------------------------------------------


def lacking(made: Federation) -> None:
    """South has no text of class 1."""
    made.nodes[1].labels = torch.zeros_like(made.nodes[1].labels)


@pytest.mark.parametrize("kind", ["class", "size", "kl", "fedid", "adafd"])
def test_fedkd_learns_the_weighted_logits_once(pair: Any, kind: str) -> None:
    changes = {
        "class": (),
        "size": ("method.preset=authors_code",),
        "kl": ("method.loss=kl", "method.temperature=3", "method.class_weights=false"),
        "fedid": ("method.preset=fedid",),
        "adafd": ("method.preset=adafd",),
    }
    one, two = pair("fedkd", "method.distill_epochs=1", *changes[kind])
    lacking(one), lacking(two)
    one.run()
    falls = kind == "size"
    for node in two.nodes:
        privately(node, 0, falls=falls)
    north, south = (say(node) for node in two.nodes)
    z = weigh(shares(two), [north, south])
    if kind == "class":
        zeros, texts = int((two.nodes[0].labels == 0).sum()), len(two.nodes[1].private)
        first = (zeros * north[:, 0] + texts * south[:, 0]) / (zeros + texts)
        z = torch.stack([first, north[:, 1]], dim=-1)  # class 1 is north's alone to say
        shown = one.events("weights")[0]["weights"]
        assert shown["north"] == pytest.approx([zeros / (zeros + texts), 1.0])
        assert shown["south"] == pytest.approx([texts / (zeros + texts), 0.0])
        on_public(two.central, 0, lambda guess, i: (guess - z[i]).abs().mean())
    elif kind in ("size", "fedid"):
        on_public(two.central, 0, lambda guess, i: ((guess - z[i]) ** 2).mean(), falls=falls)
    elif kind == "adafd":
        on_public(two.central, 0, kl(z.softmax(-1)))
    else:
        y = (z / 3).softmax(-1)
        on_public(two.central, 0, lambda guess, i: 9 * kl(y)(guess / 3, i))
    assert_same(one, two)


def test_fedkd_is_one_shot_and_says_so(federation: Make, small: Small) -> None:
    with pytest.raises(ValueError, match=r"fedkd is one shot.*set rounds = 1"):
        federation(small("method.name=fedkd", "rounds=2"))
    with pytest.raises(ValueError, match=r"counts every site once.*set method.class_weights = false"):
        federation(small("method.name=fedkd", "rounds=1", "method.aggregation=median"))


def test_fedkd_weighs_anew_without_a_site_that_fails(pair: Any) -> None:
    one, two = pair("fedkd", "method.distill_epochs=1", "exchange.quorum=0.5")
    spoil(one.nodes[1], with_nan)
    one.run()
    assert [event["site"] for event in one.events("left_out")] == ["south"]
    privately(two.nodes[0], 0)
    z = say(two.nodes[0])
    on_public(two.central, 0, lambda guess, i: (guess - z[i]).abs().mean())
    assert torch.allclose(flat(one.central.learner), flat(two.central.learner), atol=1e-9)


def test_a_site_counts_its_classes_and_the_server_checks_the_sum(federation: Make, small: Small) -> None:
    made = federation(small("method.name=fedkd", *QUICK, "exchange.quorum=0.5"))
    lacking(made)
    north, south = made.nodes
    reply = south.answer(Ask("query.counts"))
    assert reply.arrays["counts"].tolist() == [len(south.private), 0]
    assert set(reply.arrays) == {"counts"}

    def boast(ask: Ask, reply: Reply) -> Reply:
        return Reply(reply.node, {n: v * 1000 if n == "counts" else v for n, v in reply.arrays.items()}, reply.metrics)

    spoil(north, boast)
    made.run()
    [event] = made.events("left_out")
    assert event["site"] == "north"
    assert "do not add up to the site's" in event["reason"]


@pytest.mark.parametrize(("preset", "loss"), [("fedid", hard), ("adafd", soft)])
def test_dsfl_as_in_the_tables_of_fedid_and_adafd(pair: Any, preset: str, loss: Callable[[Tensor], Loss]) -> None:
    """Logits weighed by size and sharpened; FedID's program takes their argmax."""
    one, two = pair("ds-fl", "method.distill_epochs=1", f"method.preset={preset}")
    one.run()
    for node in two.nodes:
        privately(node, 0)
    target = (weigh(shares(two), [say(node) for node in two.nodes]) / 0.1).softmax(-1)
    on_public(two.central, 0, loss(target))
    for node in two.nodes:
        on_public(node, 2, loss(target))
    assert_same(one, two)


@pytest.mark.parametrize("averaged", ["probs", "logits"])
def test_dsfl_without_reduction_teaches_the_plain_mean(pair: Any, averaged: str) -> None:
    """The paper's SA; weighed by size and of probabilities it is what FedID's eq. 10 makes."""
    plain = ("method.reduction=none", "method.weights=size", f"method.era_input={averaged}")
    one, two = pair("ds-fl", "method.distill_epochs=1", *plain)
    one.run()
    for node in two.nodes:
        privately(node, 0)
    said = [say(node) for node in two.nodes]
    if averaged == "probs":
        target = weigh(shares(two), [z.softmax(-1) for z in said])
    else:
        target = weigh(shares(two), said).softmax(-1)
    on_public(two.central, 0, soft(target))
    for node in two.nodes:
        on_public(node, 2, soft(target))
    assert_same(one, two)
    with pytest.raises(ValueError, match="plain mean, which has no temperature"):
        pair("ds-fl", *plain, "method.temperature=0.5")


@pytest.mark.parametrize("name", ["fedkd", "ds-fl", "mhat"])
def test_the_central_model_may_also_learn_the_servers_labelled_texts(pair: Any, name: str) -> None:
    """FedID's figure 3: after its distillation, and before it teaches in turn."""
    soft = ("method.loss=kl",) if name == "mhat" else ()  # so that its sites feel every change of its central model
    one, two = pair(name, "method.distill_epochs=1", "method.labelled_epochs=1", *soft)
    bare, _ = pair(name, "method.distill_epochs=1", *soft)
    one.run(), bare.run()
    texts, labels = two.central.labelled, two.central.labels
    two.central.load_weights(bare.central.weights())
    train(two.central.learner, (1, 1), texts, np.arange(len(texts)), lambda z, i: F.cross_entropy(z, labels[i]))
    assert torch.allclose(flat(one.central.learner), flat(two.central.learner), atol=1e-9)
    moved = not torch.equal(flat(one.nodes[0].learner), flat(bare.nodes[0].learner))
    assert moved == (name == "mhat")  # whose central model teaches the sites
    with pytest.raises(ValueError, match=r"data.labelled is 0; give it some"):
        pair(name, "method.labelled_epochs=1", "data.labelled=0")


# --- MHAT, logit-FedAvg, FedED -------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", ["hard", "kl"])
def test_mhat_learns_every_site_and_teaches_with_its_own_logits(pair: Any, loss: str) -> None:
    one, two = pair("mhat", "method.distill_epochs=1", f"method.loss={loss}")
    one.run()
    for node in two.nodes:
        privately(node, 0)
    said, weights = [say(node) for node in two.nodes], shares(two)

    def central(guess: Tensor, i: np.ndarray) -> Tensor:
        each = [hard(z)(guess, i) if loss == "hard" else kl(z.softmax(-1))(guess, i) for z in said]
        return weigh(weights, each)

    on_public(two.central, 0, central)
    own = say(two.central)
    for node in two.nodes:
        on_public(node, 2, hard(own) if loss == "hard" else kl(own.softmax(-1)))
    assert_same(one, two)


def test_logit_fedavg_is_a_plain_mean_and_hard_labels_back(pair: Any) -> None:
    one, two = pair("logit-fedavg", "method.distill_epochs=1", "method.preset=authors_code")
    one.run()
    for node in two.nodes:
        privately(node, 0, falls=True)
    z = weigh([0.5, 0.5], [say(node) for node in two.nodes])
    on_public(two.central, 0, kl(z.softmax(-1)), falls=True)
    own = say(two.central)
    for node in two.nodes:
        on_public(node, 2, hard(own), falls=True)
    assert_same(one, two)


def test_in_adafds_program_every_epoch_of_logit_fedavg_begins_anew(pair: Any) -> None:
    """A new AdamW in each of two epochs, whose rate falls from 1 to 1/2 and starts at 1 again."""
    epochs = ("method.local_epochs=2", "method.distill_epochs=2")
    one, two = pair("logit-fedavg", *epochs, "method.preset=authors_code")
    one.run()
    for node in two.nodes:
        for epoch in range(2):
            privately(node, epoch, falls=0.5)
    z = weigh([0.5, 0.5], [say(node) for node in two.nodes])
    for epoch in range(2):
        on_public(two.central, epoch, kl(z.softmax(-1)), falls=0.5)
    own = say(two.central)
    for node in two.nodes:
        for epoch in range(2):
            on_public(node, 3 + epoch, hard(own), falls=0.5)
    assert_same(one, two)


@pytest.mark.parametrize("preset", ["paper", "authors_code"])
def test_feded_starts_sites_from_the_central_weights_and_distils_their_predictions(pair: Any, preset: str) -> None:
    one, two = pair("feded", "method.distill_epochs=1", f"method.preset={preset}", "sites.south.model=tiny-bert")
    one.run()
    falls = preset == "authors_code"
    for node in two.nodes:
        node.learner.load_weights(two.central.weights())
        privately(node, 0, falls=falls)
    said = [say(node) for node in two.nodes]
    y = weigh(shares(two), said).softmax(-1) if falls else weigh(shares(two), [z.softmax(-1) for z in said])
    on_public(two.central, 0, kl(y), falls=falls)
    assert_same(one, two)


def test_feded_refuses_different_models(federation: Make, small: Small) -> None:
    with pytest.raises(ValueError, match=r"feded .* must be the same model.*tiny-roberta"):
        federation(small("method.name=feded")).run()


# --- FedMD, Cronus -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", ["l1", "kl"])
def test_fedmd_warms_up_digests_the_mean_scores_and_revisits(pair: Any, loss: str) -> None:
    one, two = pair("fedmd", "method.distill_epochs=1", "method.warmup_epochs=1", f"method.loss={loss}")
    one.run()
    local = [privately(node, 0) for node in two.nodes]
    z = weigh([0.5, 0.5], [say(node) for node in two.nodes])

    def digest(guess: Tensor, i: np.ndarray) -> Tensor:
        return (guess - z[i]).abs().mean() if loss == "l1" else kl(z.softmax(-1))(guess, i)

    for node, optimizer in zip(two.nodes, local, strict=True):
        on_public(node, 2, digest)
        privately(node, 3, optimizer)
    on_public(two.central, 0, digest)
    assert_same(one, two)


def test_fedmd_draws_its_public_texts_for_the_round(federation: Make, small: Small) -> None:
    made = federation(small("method.name=fedmd", *QUICK, "rounds=2", "method.subset=10", "method.distill_epochs=1"))
    seen: list[list[int]] = []
    honest = made.nodes[0].answer

    def answer(ask: Ask) -> Reply:
        if ask.verb in ("query.predictions", "train.distil"):
            seen.append(ask.arrays["rows"].tolist())
        return honest(ask)

    made.nodes[0].answer = answer  # type: ignore[method-assign]
    made.run()
    first, digest, second, _ = seen
    assert first == digest == sorted(set(first))
    assert len(first) == len(second) == 10
    assert first != second


def test_cronus_trains_on_private_and_public_texts_together(pair: Any) -> None:
    one, two = pair("cronus", "method.distill_epochs=1", "method.warmup_epochs=1")
    one.run()
    local = [privately(node, 0) for node in two.nodes]
    y = weigh([0.5, 0.5], [say(node).softmax(-1) for node in two.nodes])
    for node, optimizer in zip(two.nodes, local, strict=True):
        count = len(node.private)
        with node.learner.at(1, 2):
            order = torch.randperm(count + 40).numpy()
            node.learner.model.train()
            for start in range(0, len(order), 16):
                batch = order[start : start + 16]
                texts = [padded(node, int(place), count) for place in batch]
                longest = max(text["input_ids"].shape[1] for text in texts)
                stacked = {n: torch.cat([widen(t[n], longest, fill(node, n)) for t in texts]) for n in texts[0]}
                log_p = node.learner.model(stacked).log_softmax(-1)
                losses = [
                    -log_p[j, node.labels[place]] if place < count else -(y[place - count] * log_p[j]).sum()
                    for j, place in enumerate(batch)
                ]
                optimizer.zero_grad()
                torch.stack(losses).mean().backward()  # type: ignore[no-untyped-call]
                optimizer.step()
    on_public(two.central, 0, soft(y))
    # AdamW's first step is almost sign(g), and near y = 1/2 some g are so small that rounding turns them
    assert_same(one, two)


def padded(node: Node, place: int, private: int) -> dict[str, Tensor]:
    return node.private.batch([place]) if place < private else node.public.batch([place - private])


def widen(values: Tensor, longest: int, filling: int) -> Tensor:
    return F.pad(values, (0, longest - values.shape[1]), value=filling)


def fill(node: Node, column: str) -> int:
    return 0 if column == "attention_mask" else node.private.padding[column]


def test_a_site_refuses_targets_that_do_not_fit_when_it_trains_on_both(federation: Make, small: Small) -> None:
    node = federation(small()).nodes[0]
    settings = {"private": True, "loss": "soft", "epochs": 1}
    with pytest.raises(WireError, match=r"targets of shape \(3, 2\)"):
        node.answer(Ask("train.distil", {"rows": np.arange(4), "targets": np.ones((3, 2), np.float32)}, settings))
    with pytest.raises(WireError, match="from 0 to 39"):
        node.answer(Ask("train.distil", {"rows": np.array([40]), "targets": np.ones((1, 2), np.float32)}, settings))


THREE = 'sites=[{name="a",model="tiny-bert"},{name="b",model="tiny-bert"},{name="c",model="tiny-bert"}]'


def lie(ask: Ask, reply: Reply) -> Reply:
    """Class 1 of every text, in predictions or by the bias of an uploaded model."""
    sure = np.float32([-50, 50])
    lies = {"logits": np.tile(sure, (40, 1)), "classifier.bias": sure}
    return Reply(reply.node, {name: lies.get(name, value) for name, value in reply.arrays.items()}, reply.metrics)


@pytest.mark.parametrize("method", ["fedid", "adafd"])
def test_fedid_and_adafd_take_robust_rules(federation: Any, small: Any, method: str) -> None:
    run = federation(small(f"method.name={method}", "method.aggregation=median"))
    made, fed = run.method, run.federation
    said = {"a": [[0.0, 2.0]], "b": [[1.0, 0.0]], "c": [[-50.0, 50.0]]}
    replies = [Reply(name, {"logits": np.float32(z)}, {"texts": 10, "losses": [0.5]}) for name, z in said.items()]
    if method == "adafd":
        arrays = {r.node: r.arrays["logits"] for r in replies}
        weights = made._weigh(fed, {r.node: r.metrics for r in replies}, arrays)
        assert made._combine(arrays, weights).tolist() == [[0.0, 2.0]]
    else:
        middle = 1 / (1 + np.exp(2.0))  # of site a; b says e / (1 + e), c says 0
        y, _ = made.ensemble(replies, dict.fromkeys("abc", 1 / 3))
        assert y == pytest.approx(np.array([[middle, 1 - middle]]))


def test_under_a_robust_rule_a_liar_does_not_count(pair: Any) -> None:
    one, two = pair("logit-fedavg", "method.distill_epochs=1", "method.aggregation=cronus", THREE)
    spoil(one.nodes[2], lie)
    one.run()
    for node in two.nodes:
        privately(node, 0)
    z = weigh([0.5, 0.5], [say(node) for node in two.nodes[:2]])
    on_public(two.central, 0, kl(z.softmax(-1)))
    assert torch.allclose(flat(one.central.learner), flat(two.central.learner), atol=1e-9)


@pytest.mark.parametrize("name", ["ds-fl", "feded", "fedmd", "cronus", "fedkd", "feddf"])
def test_every_method_that_averages_predictions_takes_the_rule(federation: Make, small: Small, name: str) -> None:
    ends = []
    for rule in ("mean", "median"):
        changes = [THREE, f"method.aggregation={rule}", "method.distill_epochs=1", "report.evaluate=end"]
        changes += {"fedkd": ["method.class_weights=false"], "fedmd": ["method.loss=kl"]}.get(name, [])
        made = federation(small(f"method.name={name}", *QUICK, *changes))
        spoil(made.nodes[2], lie)
        made.run()
        ends.append(flat(made.central.learner))
    assert not torch.equal(ends[0], ends[1])


# --- FedDF ---------------------------------------------------------------------------------------------------------


def fuse(
    two: Federation, weights: list[float], falls: bool, members: list[list[int]], students: list[CentralModel]
) -> None:
    """One round of FedDF for groups of nodes, each with the server's model of its kind (the first may be empty)."""
    for group, student in zip(members, students, strict=True):
        for k in group:
            two.nodes[k].learner.load_weights(student.weights())
            privately(two.nodes[k], 0, falls=falls)
    y = weigh(weights, [say(node) for node in two.nodes]).softmax(-1)
    for group, student in zip(members, students, strict=True):
        if group:
            sizes = [len(two.nodes[k].private) for k in group]
            states = [two.nodes[k].learner.weights() for k in group]
            mean = {n: sum(s / sum(sizes) * w[n] for s, w in zip(sizes, states, strict=True)) for n in states[0]}
            student.load_weights({n: np.asarray(v, states[0][n].dtype) for n, v in mean.items()})
        on_public(student, len(group), kl(y), falls=falls)  # the student's first steps were its members' predictions
        for k in group:
            two.nodes[k].learner.load_weights(student.weights())


@pytest.mark.parametrize("preset", ["paper", "authors_code"])
def test_feddf_of_one_model_fuses_then_distils(pair: Any, preset: str) -> None:
    one, two = pair("feddf", "method.distill_epochs=1", f"method.preset={preset}", "sites.south.model=tiny-bert")
    one.run()
    weights = [0.5, 0.5] if preset == "paper" else shares(two)
    fuse(two, weights, True, [[0, 1]], [two.central])
    assert_same(one, two)


@pytest.mark.parametrize("central", ["tiny-bert", "tiny-t5"])
def test_feddf_of_mixed_models_has_a_prototype_each(pair: Any, central: str) -> None:
    one, two = pair("feddf", "method.distill_epochs=1", f"central.model={central}")
    one.run()
    kinds = ["tiny-bert", "tiny-roberta"]
    made = {
        kind: CentralModel(
            two.config.model_copy(update={"central": two.config.central.model_copy(update={"model": kind})})
        )
        for kind in kinds
        if kind != central
    }
    made[central] = two.central
    members = [[0], [1]] if central in kinds else [[], [0], [1]]
    students = [made[kind] for kind in ([] if central in kinds else [central]) + kinds]
    fuse(two, [0.5, 0.5], True, members, students)
    assert_same(one, two)


def test_a_site_takes_over_weights_that_fit_and_no_others(federation: Make, small: Small) -> None:
    made = federation(small())
    north, south = made.nodes
    north.answer(Ask("train.weights", made.central.weights()))
    assert torch.equal(flat(north.learner), flat(made.central.learner))
    before = flat(south.learner)
    with pytest.raises(WireError, match="do not fit what this site shares: roberta"):
        south.answer(Ask("train.weights", made.central.weights()))
    assert torch.equal(flat(south.learner), before)


def test_feddf_sends_a_prototype_once_and_resumes_where_it_was(federation: Make, small: Small) -> None:
    changes = ("method.name=feddf", *QUICK, "rounds=2", "method.distill_epochs=1")
    made = federation(small(*changes))
    asked: list[tuple[str, bool]] = []
    honest = made.nodes[1].answer
    made.nodes[1].answer = lambda ask: (  # type: ignore[method-assign]
        asked.append((ask.verb, bool(ask.arrays))), honest(ask))[1]  # fmt: skip
    made.run()
    talk = [(verb, arrays) for verb, arrays in asked if verb.startswith("train")]
    back = ("train.weights", True)
    assert talk == [("train.parameters", True), back, ("train.parameters", False), back]

    cut = federation(small(*changes), "cut")
    stop(cut, number=2)
    with pytest.raises(RuntimeError, match="power cut"):
        cut.run()
    again = federation(small(*changes), "cut")
    again.run(resume=True)
    assert again.weights() == made.weights()


def stop(made: Federation, number: int) -> None:
    begin = made.method.round

    def round_(fed: Any) -> Any:
        if fed.number == number:
            raise RuntimeError("power cut")
        return begin(fed)

    made.method.round = round_  # type: ignore[method-assign]


# --- bounds --------------------------------------------------------------------------------------------------------


def test_isolated_sites_train_alone_and_the_central_model_stays(pair: Any) -> None:
    one, two = pair("isolated")
    summary = one.run()
    for node in two.nodes:
        privately(node, 0)
    assert_same(one, two)
    assert all(site["after"]["accuracy"] >= 0 for site in summary["sites"].values())


def test_centralized_trains_on_everybodys_texts_and_sites_stay(pair: Any) -> None:
    one, two = pair("centralized")
    one.run()
    texts = two.central.texts.private
    labels = torch.from_numpy(np.asarray(texts.labels))
    encoded = two.central.learner.model.encode(texts.texts)
    assert len(texts) == sum(len(node.private) for node in two.nodes)
    train(two.central.learner, (1, 0), encoded, np.arange(64), lambda z, i: F.cross_entropy(z, labels[i]))
    assert_same(one, two)


def test_centralized_says_why_it_cannot_run_where_the_texts_are_with_the_sites(federation: Make, small: Small) -> None:
    made = federation(small("method.name=centralized", *QUICK))
    made.central.private = made.central.learner.model.encode([])
    with pytest.raises(ValueError, match="here they are with the sites"):
        made.run()
