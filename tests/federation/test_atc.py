"""ATC on real models: sites with four kinds of tasks, what they exchange, and what stays with them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedstill.client.own_task import OwnTaskNode
from fedstill.common import checkpoint
from fedstill.common.config import ConfigError
from fedstill.common.wire import Ask, Reply
from fedstill.common.wire.frames import HELLO, REPLY, Frame
from fedstill.server.central import SharedModel

from .conftest import Federation, streams
from .mixed import KINDS, mixed_run
from .test_baselines import stop

Make = Callable[..., Federation]


class Heard:
    """Everything that was asked and answered in a run."""

    def __init__(self, made: Federation) -> None:
        self.talk: list[tuple[str, Ask, Reply]] = []
        for node in made.nodes:
            node.answer = self._listen(node.name, node.answer)  # type: ignore[method-assign]

    def _listen(self, name: str, honest: Callable[[Ask], Reply]) -> Callable[[Ask], Reply]:
        def answer(ask: Ask) -> Reply:
            reply = honest(ask)
            self.talk.append((name, ask, reply))
            return reply

        return answer

    def of(self, site: str, verb: str) -> list[tuple[Ask, Reply]]:
        return [(ask, reply) for name, ask, reply in self.talk if (name, ask.verb) == (site, verb)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Federation, Heard, dict[str, Any]]:
    """One run of both stages, listened to: 2 rounds of ASSIGN (MLM, denoising), 3 of CONTRAST."""
    folder = tmp_path_factory.mktemp("atc")
    made = Federation(mixed_run(folder / "files", "rounds=5", "seed=3"), folder / "run")
    heard = Heard(made)
    return made, heard, made.run()


def test_both_stages_run_and_every_site_is_scored(whole: Any) -> None:
    made, _, summary = whole
    assert [event["metrics"].get("objective") for event in made.events("round_finished")][:2] == ["mlm", "denoising"]
    assert [event["metrics"].get("contrasted") for event in made.events("round_finished")][2:] == [0, 4, 4]
    assert summary["central"] == {}
    assert all(0 <= site["after"]["score"] <= 1 for site in summary["sites"].values())
    assert not made.events("left_out")
    for name, (kind, _) in KINDS.items():
        [*_, last] = map(json.loads, (made.folder / f"sites/{name}/run/scores.jsonl").read_text().splitlines())
        assert (last.pop("round"), last.pop("kind"), last.pop("verb")) == (5, kind, "evaluate.test")
        assert np.mean(list(last.values())) == pytest.approx(summary["sites"][name]["after"]["score"])
    from transformers import AutoModel

    central = AutoModel.from_pretrained(made.folder / "run/central")
    assert sum(value.numel() for value in central.parameters()) > 1_000_000


def test_a_site_is_sent_eq_2_of_its_cluster(whole: Any) -> None:
    """w_n of round 2, worked out from what was said in round 1."""
    made, heard, _ = whole
    clusters = made.events("clusters")[0]["clusters"]
    first = {site: heard.of(site, "train.corrupted")[0] for site in clusters}
    for site in clusters:
        ask, _ = first[site]
        members = [other for other in clusters if clusters[other] == clusters[site]]
        total = sum(first[other][1].metrics["texts"] for other in members)
        second = heard.of(site, "train.shared")[0][0]
        assert set(second.arrays) == set(first[site][1].arrays)  # what MLM moved, and not the decoder
        for name, value in second.arrays.items():
            mean = sum(first[o][1].metrics["texts"] / total * first[o][1].arrays[name] for o in members)
            assert np.allclose(value, ask.arrays[name] + mean, atol=1e-6), name
    begun = [heard.of(site, "train.corrupted")[0][0].arrays for site in clusters]
    assert all(np.array_equal(begun[0][name], other[name]) for other in begun for name in begun[0])


def test_contrast_moves_the_encoder_alone_by_eq_4(whole: Any) -> None:
    made, heard, _ = whole
    nearest = made.events("neighbours")[1]["nearest"]
    for site in nearest:
        (_, _, (before, _), (after, _), _) = heard.of(site, "train.shared")  # after rounds 3 and 4
        said = {other: heard.of(other, "train.contrast")[1][1] for other in nearest}
        members = [site, nearest[site][0]]  # K = 2, itself included
        total = sum(said[other].metrics["texts"] for other in members)
        for name in said[site].arrays:
            assert name.startswith("encoder.")
            mean = sum(said[o].metrics["texts"] / total * said[o].arrays[name] for o in members)
            assert np.allclose(after.arrays[name], before.arrays[name] + mean, atol=1e-6)


def test_representations_of_neighbours_and_the_rest_come_back(whole: Any) -> None:
    made, heard, _ = whole
    nearest = made.events("neighbours")[1]["nearest"]
    h = {site: heard.of(site, "query.representations")[1][1].arrays["h"] for site in KINDS}
    for site in KINDS:
        told = heard.of(site, "train.contrast")[2][0].arrays
        near, far = nearest[site][:1], nearest[site][1:]  # K = 2, itself included, as in eq. 4
        positive = np.mean([h[other].astype(np.float32) for other in near], axis=0)
        assert np.allclose(told["positive"], positive, atol=1e-2)
        assert np.array_equal(told["negatives"], np.stack([h[other] for other in far]))
        assert "contrast" in heard.of(site, "train.contrast")[2][1].metrics


@pytest.mark.parametrize(("through", "reached"), [("decoder", False), ("encoder", True)])
def test_eq_3_reaches_the_encoder_only_where_h_passes_it(whole: Any, through: Any, reached: bool) -> None:
    model = whole[0].nodes[0].learner.model
    tokens = torch.randint(5, 500, (2, 8), generator=torch.Generator().manual_seed(1))
    model.zero_grad(set_to_none=True)
    model.eval()
    model.represent(torch.randn(2, 8, model.width), tokens, through).square().sum().backward()
    moved = [name for name, value in model.net.encoder.named_parameters() if value.grad is not None]
    model.zero_grad(set_to_none=True)
    assert bool(moved) == reached


def test_some_sites_may_have_more_neighbours(tmp_path: Path) -> None:
    """K is 2 for all but dan, whose encoder moves with two others and whose C+ has both."""
    changes = ("rounds=3", "seed=3", "method.assign_rounds=0", "method.neighbours_of={dan=3}")
    made = Federation(mixed_run(tmp_path / "files", *changes), tmp_path / "run")
    heard = Heard(made)
    made.run()
    nearest = made.events("neighbours")[1]["nearest"]
    negatives = {site: len(heard.of(site, "train.contrast")[2][0].arrays["negatives"]) for site in KINDS}
    assert negatives == {"ann": 2, "bob": 2, "cat": 2, "dan": 1}
    said = {site: heard.of(site, "train.contrast")[1][1] for site in KINDS}
    (before, _), (after, _) = heard.of("dan", "train.shared")[:2]
    members = ["dan", *nearest["dan"][:2]]
    total = sum(said[other].metrics["texts"] for other in members)
    for name in said["dan"].arrays:
        mean = sum(said[o].metrics["texts"] / total * said[o].arrays[name] for o in members)
        assert np.allclose(after.arrays[name], before.arrays[name] + mean, atol=1e-6)
    with pytest.raises(ValueError, match=r"neighbours_of names eve, and no site is called so"):
        Federation(mixed_run(tmp_path / "files", "method.neighbours_of={eve=3}"), tmp_path / "other")


def test_a_run_contrasts_through_the_encoder(tmp_path: Path) -> None:
    changes = ("rounds=3", "seed=3", "method.assign_rounds=0", "method.contrast_through=encoder")
    made = Federation(mixed_run(tmp_path / "files", *changes), tmp_path / "run")
    heard = Heard(made)
    made.run()
    assert heard.of("ann", "train.contrast")[2][0].settings["through"] == "encoder"
    assert heard.of("ann", "train.contrast")[2][1].metrics["contrast"] > 0


def test_private_parts_are_drawn_by_the_seed_and_their_shape(federation: Make, tmp_path: Path) -> None:
    """ann has two classes and bob two ends of an answer: heads of one shape begin alike, whatever a site is called."""
    ann, bob, cat, dan = (node.learner.whole() for node in federation(mixed_run(tmp_path / "files")).nodes)
    for one, other in ((ann, bob), (cat, dan)):
        assert one.keys() == other.keys()
        assert all(np.array_equal(one[name], other[name]) for name in one)
    assert {"classifier.weight", "contrast.0.weight"} <= ann.keys()
    other_seed = federation(mixed_run(tmp_path / "files", "seed=5")).nodes[0].learner.whole()
    assert not np.array_equal(ann["classifier.weight"], other_seed["classifier.weight"])


def test_a_site_counts_items_not_windows(whole: Any) -> None:
    made, _, _ = whole
    assert {node.name: node.greeting()["texts"] for node in made.nodes} == {
        node.name: len(node.work.train) for node in made.nodes
    }
    asking = next(node for node in made.nodes if node.work.task.kind == "question-answering")
    assert len(asking.private) >= len(asking.work.train)


def test_the_synthetic_set_is_made_once_sent_once_and_in_half_precision(whole: Any) -> None:
    made, heard, _ = whole
    shown = [heard.of(site, "query.features") for site in KINDS]
    assert [len(each) for each in shown] == [1, 1, 1, 1]
    said = [each[0][1].arrays["features"] for each in shown]
    assert {(value.dtype.name, value.shape) for value in said} == {("float16", (6, 8, 128))}
    (first, _), (second, _) = heard.of("ann", "query.representations")
    assert first.arrays["features"].dtype == np.float16
    assert not second.arrays
    primary = np.random.default_rng(0).integers(4, size=6) * 0  # found below: who weighs one half
    mixed = first.arrays["features"].astype(np.float32)
    every = np.stack([value.astype(np.float32) for value in said])
    for item in range(6):
        candidates = [0.5 * every[n, item] + (every[:, item].sum(0) - every[n, item]) / 6 for n in range(4)]
        distances = [np.abs(mixed[item] - candidate).max() for candidate in candidates]
        primary[item] = int(np.argmin(distances))
        assert min(distances) < 2e-3
    assert len(set(primary.tolist())) > 1
    holder = made.central
    assert isinstance(holder, SharedModel)
    assert first.arrays["tokens"].shape == (6, 8)


def test_nothing_that_leaves_a_site_speaks_of_its_task(whole: Any) -> None:
    """Every reply and the greeting as frames: no label, no task, no metric's name, no head."""
    made, heard, _ = whole
    secrets = ["classif", "answer", "summar", "question", "generat", "early", "late", "label", "accuracy", "exact",
               "rouge", "bleu", "meteor", "f1", "pooler", "kind", "span", "target"]  # fmt: skip
    frames = [Frame(HELLO, facts={"token": "t", **node.greeting()}) for node in made.nodes]
    told = [{name: value for name, value in reply.metrics.items() if name != "ledger"} for _, _, reply in heard.talk]
    frames += [Frame(REPLY, 0, r.arrays, {"metrics": m}) for (_, _, r), m in zip(heard.talk, told, strict=True)]
    assert len(frames) > 60
    allowed = ("encoder.", "decoder.", "mlm.")
    for frame in frames:
        head = frame.text.decode().lower()
        head = head.replace("output.", "")  # a layer of BERT
        assert not [word for word in secrets if word in head], head[:300]
        assert all(name.startswith(allowed) or name in ("features", "h") for name in frame.arrays)
        assert not [name for name in frame.arrays if name.startswith("decoder.")] or "encoder." in head
    in_contrast = [reply for _, ask, reply in heard.talk if ask.verb == "train.contrast"]
    assert {name.split(".")[0] for reply in in_contrast for name in reply.arrays} == {"encoder"}
    greetings = [node.greeting() for node in made.nodes]
    assert len({json.dumps({**facts, "name": "", "texts": 0}) for facts in greetings}) == 1
    metrics = {name for _, _, reply in heard.talk for name in reply.metrics}
    assert metrics <= {"seconds", "texts", "loss", "contrast", "score", "ledger"}
    heads = [reply.metrics["ledger"] for _, _, reply in heard.talk if "ledger" in reply.metrics]
    assert all(re.fullmatch("[0-9a-f]{64}", head) for head in heads)  # a salted hash


def test_planted_domains_are_found(federation: Make, tmp_path: Path) -> None:
    """Two sites speak of the sea and two of the kitchen, each with another task: clusters follow the words."""
    changes = ("rounds=1", "method.assign_rounds=1", "method.assign_steps=12", "method.corruption=mlm")
    made = federation(mixed_run(tmp_path / "files", *changes))
    made.run()
    [event] = made.events("clusters")
    assert event["clusters"] == {"ann": 0, "bob": 1, "cat": 0, "dan": 1}


def test_resume_gives_the_same_bits_over_streams_too(federation: Make, tmp_path: Path) -> None:
    config = mixed_run(tmp_path / "files", "rounds=4", "method.assign_rounds=1", sites=("ann", "bob", "dan"))
    one = federation(config)
    with streams(one) as link:
        one.run(link)
    cut_ = federation(config, "cut")
    stop(cut_, number=4)
    with pytest.raises(RuntimeError, match="power cut"):
        cut_.run()
    again = federation(config, "cut")
    again.run(resume=True)
    for node, other in zip(one.nodes, again.nodes, strict=True):
        mine, yours = checkpoint.flat(node.state()), checkpoint.flat(other.state())
        assert mine.keys() == yours.keys()
        assert all(np.array_equal(mine[name], yours[name]) for name in mine), node.name
    mine, yours = checkpoint.flat(one.method.state()), checkpoint.flat(again.method.state())
    assert mine.keys() == yours.keys()
    assert all(np.array_equal(mine[name], yours[name]) for name in mine)


def test_a_t5_has_its_encoder_and_decoder_already(federation: Make, tmp_path: Path) -> None:
    made = federation(mixed_run(tmp_path / "files", "rounds=3", "method.assign_rounds=1", model="tiny-t5"))
    heard = Heard(made)
    made.run()
    assert not made.events("left_out")
    sent = heard.of("cat", "train.contrast")[0][1].arrays
    assert "shared.weight" in sent
    assert all(name.startswith(("shared.", "encoder.")) for name in sent)


def test_a_site_that_was_left_out_is_sent_all_it_may_lack(federation: Make, tmp_path: Path) -> None:
    changes = ("rounds=2", "method.assign_rounds=2", "exchange.quorum=0.5", "method.corruption=mlm")
    made = federation(mixed_run(tmp_path / "files", *changes, sites=("ann", "bob", "dan")))
    heard = Heard(made)
    honest = made.nodes[1].answer

    def answer(ask: Ask) -> Reply:
        if ask.verb == "train.corrupted" and ask.settings["round"] == 2:
            honest(ask)
            raise RuntimeError("the line is dead")
        return honest(ask)

    made.nodes[1].answer = answer  # type: ignore[method-assign]
    made.run()
    parts = {site: {n.split(".")[0] for n in heard.of(site, "train.shared")[1][0].arrays} for site in ("ann", "bob")}
    assert parts == {"ann": {"encoder", "mlm"}, "bob": {"encoder", "decoder", "mlm"}}


def test_ablations_leave_out_what_they_say(federation: Make, tmp_path: Path) -> None:
    sites = ("ann", "bob", "dan")
    plain = federation(mixed_run(tmp_path / "files", "rounds=2", "method.assign_rounds=0", "method.contrast=false",
                                 sites=sites))  # fmt: skip
    heard = Heard(plain)
    plain.run()
    assert {ask.verb for _, ask, _ in heard.talk} == {"evaluate.test", "query.save", "train.contrast", "train.shared"}
    encoders = [{n: v for n, v in plain.method.models[site].items() if n.startswith("encoder.")} for site in sites]
    for name in encoders[0]:  # FedAvg: one encoder for all, up to the order of sums
        assert np.allclose(encoders[0][name], encoders[1][name], atol=1e-6)
    changes = ("rounds=3", "method.assign_rounds=1", "method.clustering=false", "method.contrast_loss=false")
    bare = federation(mixed_run(tmp_path / "files", *changes, sites=sites))
    heard = Heard(bare)
    bare.run()
    assert not [ask for _, ask, _ in heard.talk if ask.verb.startswith("query.") and ask.verb != "query.save"]
    assert set(bare.events("clusters")[0]["clusters"].values()) == {0}
    assert not any("positive" in ask.arrays for _, ask, _ in heard.talk)


def test_what_a_site_shows_is_clipped_and_noised_anew_every_time(federation: Make, tmp_path: Path) -> None:
    config = mixed_run(tmp_path / "files", sites=("ann",))
    one, two = federation(config).nodes[0], federation(config).nodes[0]
    assert isinstance(one, OwnTaskNode)

    def show(node: Any, clip: float, noise: float, number: int = 1) -> np.ndarray:
        settings = {"items": 6, "positions": 8, "clip": clip, "noise": noise, "round": number}
        return np.asarray(node.answer(Ask("query.features", {}, settings)).arrays["features"], np.float32)

    plain, short = show(one, 0, 0), show(one, 0.5, 0)
    assert np.linalg.norm(plain, axis=-1).max() > 5
    assert np.linalg.norm(short, axis=-1).max() == pytest.approx(0.5, abs=1e-3)
    added = show(one, 0.5, 2.0) - short
    assert added.std() == pytest.approx(1.0, abs=0.05)
    assert np.array_equal(show(two, 0, 0), plain)  # the same seed, the same model
    assert np.abs(show(two, 0.5, 2.0) - show(one, 0.5, 2.0)).mean() > 0.5  # but not the same noise
    assert not np.array_equal(show(one, 0.5, 2.0), show(one, 0.5, 2.0))


def test_the_other_methods_on_sites_with_different_tasks(federation: Make, tmp_path: Path) -> None:
    made = federation(mixed_run(tmp_path / "files", 'method={name="fedavg",local_epochs=1}', "rounds=1"))
    heard = Heard(made)
    summary = made.run()
    said = {name: reply.arrays for name, ask, reply in heard.talk if ask.verb.startswith("train.") and reply.arrays}
    assert {name.split(".")[0] for state in said.values() for name in state} == {"encoder"}
    sizes = {name: site["texts"] for name, site in summary["sites"].items()}
    for name, value in made.central.weights().items():
        each = [said[site][name] * size for site, size in sizes.items()]
        assert np.allclose(value, sum(each) / sum(sizes.values()), atol=1e-6)
    with pytest.raises(ValueError, match=r"fedid needs texts and labels that all sites share.*such as atc or fedavg"):
        federation(mixed_run(tmp_path / "files", 'method={name="fedid"}'))


def test_runs_that_cannot_be_are_refused_with_the_cure(federation: Make, tmp_path: Path, small: Any) -> None:
    with pytest.raises(ValueError, match=r'set task.name = "mixed"'):
        federation(small("method.name=atc", "sites.south.model=tiny-bert"))
    with pytest.raises(ValueError, match=r"method.noise is in units of method.clip.*set clip"):
        federation(mixed_run(tmp_path / "files", "method.noise=1.0"))
    with pytest.raises(ValueError, match=r"method.assign_rounds = 9 is above rounds = 4: lower it"):
        federation(mixed_run(tmp_path / "files", "method.assign_rounds=9"))
    config = mixed_run(tmp_path / "files", sites=("ann",))
    bare = config.model_copy(update={"sites": [config.sites[0].model_copy(update={"task": None})]})
    with pytest.raises(ConfigError, match=r"site ann has no task.*write a \[task\] table"):
        federation(bare)
