"""Confident Sinkhorns: weights by hand, the bias of a model, and the method against its loss written out plainly."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fedstill.client.node import Node
from fedstill.common.config import RunConfig
from fedstill.common.data.tasks import Task, on_a_line
from fedstill.common.maths import confidence
from fedstill.common.maths.transport import cost_matrix
from fedstill.common.practice import Practice
from fedstill.common.wire import Ask, Reply, WireError
from fedstill.strategies import find_method
from fedstill.strategies.sinkhorn.method import Sinkhorn, support_points
from fedstill.strategies.sinkhorn.noise import noise_texts

from .conftest import Federation, precise, spoil
from .test_methods import flat, train_alone

Make = Callable[..., Federation]
Small = Callable[..., RunConfig]

QUICK = ("rounds=1", "method.distill_epochs=2", "method.pretrain_epochs=2", "method.noise_texts=40",
         "method.noise_length=12", "report.alone=false", "report.centralized=false")  # fmt: skip

# two teachers, two texts, two classes
H = np.array([[[1.0, 0.0], [0.5, 0.5]], [[0.8, 0.2], [0.5, 0.5]]], np.float32)


def test_weights_by_hand() -> None:
    half = np.full((2, 2), 0.5)
    assert np.allclose(confidence.equal(H), half)
    assert np.allclose(confidence.by_texts(H, np.array([30, 10])), [[0.75, 0.75], [0.25, 0.25]])
    # from uniform: sqrt(.5) and sqrt(2 * .09) are as 5 to 3; on the second text nobody says anything
    assert np.allclose(confidence.from_uniform(H), [[5 / 8, 0.5], [3 / 8, 0.5]])
    # from biases (.8, .2) and (.2, .8): sqrt(2) * .2 and sqrt(2) * .6, then sqrt(2) * .3 both
    biases = np.array([[0.8, 0.2], [0.2, 0.8]])
    assert np.allclose(confidence.from_bias(H, biases), [[1 / 4, 1 / 2], [3 / 4, 1 / 2]])


def test_divergences_by_hand() -> None:
    logits = torch.tensor([[0.0, math.log(3)]])  # h = (1/4, 3/4)
    forward = 0.5 * math.log(2) + 0.5 * math.log(2 / 3)  # KL((1/2, 1/2) || h)
    backward = 0.25 * math.log(0.5) + 0.75 * math.log(1.5)
    teachers = torch.tensor([[[0.5, 0.5]], [[0.0, 1.0]]])
    assert torch.allclose(confidence.kl(logits, teachers), torch.tensor([[forward], [math.log(4 / 3)]]))
    both = confidence.symmetric_kl(logits, teachers)
    assert both[0].item() == pytest.approx((forward + backward) / 2 / 2)
    assert both.isfinite().all()


def test_supports() -> None:
    stars = Task("stars", tuple("12345"), coordinates=on_a_line(5))
    row = cost_matrix(support_points(stars, "both"))[0]  # what the authors' code has: 0, 1.73, 2.45, 3.32, 4.24
    assert torch.allclose(row, torch.tensor([0, 3, 6, 11, 18], dtype=torch.float64).sqrt())
    assert torch.equal(support_points(stars, "one_hot"), torch.eye(5, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"set task.coordinates, such as \[\[1.0\], \[2.0\]\].*one_hot"):
        support_points(Task("t", ("a", "b")), "coordinates")


def ask_bias(node: Node, seed: int, noise: str = "vocabulary", count: int = 200) -> np.ndarray:
    settings = {"seed": seed, "count": count, "length": 12, "noise": noise}
    reply = node.answer(Ask("query.bias", settings=settings))
    assert set(reply.arrays) == {"bias"}
    return reply.arrays["bias"]


def test_the_bias_follows_from_the_seed_and_is_a_share_of_classes(federation: Make, small: Small) -> None:
    made = federation(small())
    train_alone(made, 3, step=0)
    node = made.nodes[0]
    for noise in ("vocabulary", "words"):
        bias = ask_bias(node, 5, noise)
        assert bias.shape == (2,)
        assert bias.sum() == pytest.approx(1)
        assert np.array_equal(bias, ask_bias(node, 5, noise))
        assert bias[0] * 200 == pytest.approx(round(float(bias[0]) * 200), abs=1e-4)
    # written out: which class comes first on the same texts
    tokenizer = node.learner.model.tokenizer
    texts = [text for chunk in noise_texts(tokenizer, 5, 200, 12, "vocabulary", False) for text in chunk]
    encoded = node.learner.model.encode(texts)
    with torch.no_grad():
        first = node.learner.model.eval()(encoded.batch(np.arange(200))).argmax(-1)
    assert ask_bias(node, 5)[1] == pytest.approx((first == 1).float().mean().item())


def test_noise_is_drawn_from_the_vocabulary_or_is_the_same_everywhere(federation: Make, small: Small) -> None:
    north, south = (node.learner.model.tokenizer for node in federation(small()).nodes)

    def draw(tokenizer: object, seed: int, kind: str, pairs: bool = False) -> list[object]:
        return [t for chunk in noise_texts(tokenizer, seed, 1500, 10, kind, pairs) for t in chunk]  # type: ignore[arg-type]

    assert draw(north, 1, "words") == draw(south, 1, "words") != draw(north, 2, "words")
    assert draw(north, 1, "vocabulary") != draw(south, 1, "vocabulary")
    assert len(draw(north, 1, "vocabulary")) == len(set(draw(north, 1, "vocabulary"))) == 1500
    assert all(isinstance(t, tuple) and t[0] != t[1] for t in draw(north, 1, "words", pairs=True))
    special = set(north.all_special_tokens)
    assert not any(token in str(text) for text in draw(north, 1, "vocabulary") for token in special)


@pytest.mark.parametrize("changes", [{"count": 0}, {"count": 10**9}, {"noise": "silence"}, {"seed": -1}])
def test_a_site_refuses_noise_without_end_or_sense(federation: Make, small: Small, changes: dict[str, object]) -> None:
    settings = {"seed": 1, "count": 10, "length": 12, **changes}
    with pytest.raises(WireError, match=r"no noise can be drawn|'noise' is str 'silence' where .* is wanted"):
        federation(small()).nodes[0].answer(Ask("query.bias", settings=settings))


def two_class_transport(h: Tensor, teachers: Tensor) -> Tensor:
    return (h[:, 0] - teachers[:, :, 0]).abs()  # two labels one apart: the mass that changes sides


def plain_kl(h: Tensor, teachers: Tensor) -> Tensor:
    return F.kl_div(h.log().expand_as(teachers), teachers, reduction="none").sum(-1)


def plain(
    two: Federation, weighting: str, distance: Callable[[Tensor, Tensor], Tensor], forgetting: bool
) -> tuple[list[float], list[float]]:
    """One round of the paper written out; the mean loss of each epoch, and the mean weight of each teacher."""
    student, rows, count = two.central, np.arange(40), 40
    student.begin_round(1)
    student.fit_labelled(2, Practice())
    learners = [node.learner for node in two.nodes]
    publics, sizes = [node.public for node in two.nodes], [float(len(node.private)) for node in two.nodes]
    if forgetting:
        learners.append(student.learner)
        publics.append(student.public)
        sizes.append(float(len(student.labelled)))
        student.predict(rows)  # a place in the run is used up
    train_alone(two, 1, step=0)
    said, biases = [], []
    seed = find_noise_seed(two)
    with torch.no_grad():
        for learner, public in zip(learners, publics, strict=True):
            model = learner.model.eval()
            said.append(F.softmax(model(public.batch(rows)), dim=-1))
            noise = next(noise_texts(model.tokenizer, seed, count, 12, "vocabulary", False))
            first = model(model.encode(noise).batch(np.arange(count))).argmax(-1)
            biases.append(torch.bincount(first, minlength=2) / count)
    h_k = torch.stack(said)
    w = {
        "A": torch.ones(len(h_k), 40),
        "D": torch.tensor(sizes)[:, None].expand(-1, 40),
        "U": (h_k - 0.5).norm(dim=-1),
        "E": (h_k - torch.stack(biases)[:, None]).norm(dim=-1),
    }[weighting]

    def loss(z: Tensor, i: np.ndarray) -> Tensor:
        return ((w[:, i] * distance(F.softmax(z, dim=-1), h_k[:, i])).sum(0) / w[:, i].sum(0)).mean()

    with student.learner.at(1, 2 if forgetting else 1):
        losses = student.learner.fit(student.public, rows, loss, 2, "distil", Practice())
    return losses, (w / w.sum(0)).mean(1).tolist()


def find_noise_seed(made: Federation) -> int:
    return int(made.method.probe(made.federation).seed)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("weighting", "forgetting"), [("A", True), ("D", True), ("D", False), ("U", True), ("E", True), ("E", False)]
)
@pytest.mark.parametrize(("name", "distance"), [("sinkhorn", two_class_transport), ("entropy", plain_kl)])
def test_the_method_is_its_algorithm_written_out(
    federation: Make,
    small: Small,
    name: str,
    weighting: str,
    distance: Callable[[Tensor, Tensor], Tensor],
    forgetting: bool,
) -> None:
    flag = f"method.without_forgetting={str(forgetting).lower()}"
    changes = (f"method.name={name}", f"method.weighting={weighting}", flag, "data.partition=dirichlet-clients", *QUICK)
    one, two = federation(precise(small(*changes))), federation(precise(small(*changes)))
    one.run()
    losses, weights = plain(two, weighting, distance, forgetting)
    told = one.events("weights")[0]["weights"]
    assert list(told) == ["north", "south", "central"][: len(weights)]
    assert list(told.values()) == pytest.approx(weights, abs=1e-5)
    assert one.events("round_finished")[0]["metrics"]["loss"] == pytest.approx(losses[-1], abs=1e-5)
    assert torch.allclose(flat(one.central.learner), flat(two.central.learner), atol=1e-9)
    for node, other in zip(one.nodes, two.nodes, strict=True):
        assert torch.equal(flat(node.learner), flat(other.learner))


def test_the_entropic_solver_leads_where_the_exact_one_does(federation: Make, small: Small) -> None:
    ends = {}
    for solver in ("w1_1d", "log_sinkhorn", "geomloss"):
        made = federation(small(*QUICK, "method.name=sinkhorn", f"method.solver={solver}", "method.weighting=U"))
        made.run()
        ends[solver] = made.events("round_finished")[0]["metrics"]["loss"]
    assert ends["log_sinkhorn"] == pytest.approx(ends["w1_1d"], abs=1e-3 * math.log(2))  # eps log C
    assert 0 < ends["geomloss"] < ends["w1_1d"]  # stopped early, a dual value is too low


def test_solver_and_support_of_a_method(federation: Make, small: Small) -> None:
    def made(*changes: str) -> Sinkhorn:
        method = federation(small("method.name=sinkhorn", *changes)).method
        assert isinstance(method, Sinkhorn)
        return method

    assert made().solver == "w1_1d"
    assert made("method.support=both", "method.solver=log_sinkhorn").solver == "log_sinkhorn"
    authors = made("method.preset=authors_code")
    assert (authors.solver, authors.p.weighting, authors.points.shape) == ("geomloss", "D", (2, 3))
    kind, params = find_method(small("method.name=entropy", "method.preset=authors_code").method)
    assert (kind.name, params.model_dump()["divergence"]) == ("entropy", "symmetric")


def three_stars(folder: Path) -> tuple[str, ...]:
    folder.mkdir(parents=True, exist_ok=True)
    words = ("bad", "fair", "good")
    rows = "".join(f"a {words[i % 3]} film number {i},{words[i % 3]}\n" for i in range(200))
    (folder / "t.csv").write_text("text,label\n" + rows)
    return ("task.name=files", f"task.train={folder / 't.csv'}", 'task.labels=["bad", "fair", "good"]')


def test_more_than_two_classes_need_to_say_where_they_lie(federation: Make, small: Small, tmp_path: Path) -> None:
    base = (*QUICK, "method.name=sinkhorn", *three_stars(tmp_path / "data"))
    with pytest.raises(ValueError, match="does not say where its labels"):
        federation(small(*base))
    with pytest.raises(ValueError, match=r"method.solver = 'w1_1d' needs labels on one line"):
        federation(small(*base, "method.support=one_hot", "method.solver=w1_1d"))
    corner = federation(small(*base, "task.coordinates=[[0, 0], [1, 0], [0, 1]]"))
    assert corner.method.solver == "log_sinkhorn"  # type: ignore[attr-defined]
    assert corner.run()["central"]["accuracy"] > 0.2
    line = federation(small(*base, "task.coordinates=[[1], [2], [3]]"))
    assert line.method.solver == "w1_1d"  # type: ignore[attr-defined]


def test_later_rounds_keep_the_first_teacher_and_resume_with_it(federation: Make, small: Small) -> None:
    changes = [change for change in QUICK if not change.startswith("rounds")]
    whole = federation(small(*changes, "method.name=sinkhorn", "rounds=2"))
    whole.run()
    assert [event["round"] for event in whole.events("round_finished")] == [1, 2]
    first = federation(small(*changes, "method.name=sinkhorn", "rounds=1"), "halves")
    first.run()
    kept = {name: value.copy() for name, value in first.method.state().items()}
    assert set(kept) == {"teacher", "bias"}
    rest = federation(small(*changes, "method.name=sinkhorn", "rounds=2"), "halves")
    rest.run(resume=True)
    assert all(np.array_equal(rest.method.state()[name], kept[name]) for name in kept)
    assert all(np.array_equal(whole.method.state()[name], kept[name]) for name in kept)
    assert torch.allclose(flat(whole.central.learner), flat(rest.central.learner), atol=1e-6)


def test_a_site_with_an_impossible_bias_is_left_out(federation: Make, small: Small) -> None:
    made = federation(small(*QUICK, "method.name=sinkhorn", "exchange.quorum=1"))

    def boast(ask: Ask, reply: Reply) -> Reply:
        twice = {name: 2 * value if name == "bias" else value for name, value in reply.arrays.items()}
        return Reply(reply.node, twice, reply.metrics)

    spoil(made.nodes[0], boast)
    with pytest.raises(RuntimeError, match=r"query\.bias: 1 of 2 sites gave a usable answer"):
        made.run()
    assert "2 shares that sum to 1" in made.events("left_out")[0]["reason"]


def test_without_labelled_texts_there_is_nothing_to_begin_with(federation: Make, small: Small) -> None:
    made = federation(small(*QUICK, "method.name=entropy", "data.labelled=0"))
    with pytest.raises(ValueError, match=r"data.labelled is 0; .*method.pretrain_epochs = 0"):
        made.run()
    federation(small(*QUICK, "method.name=entropy", "data.labelled=0", "method.pretrain_epochs=0")).run()
