"""A site's noise, budget and ledger in whole runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fedstill.client.node import Failed
from fedstill.client.release.ledger import LedgerError
from fedstill.common.config import RunConfig
from fedstill.common.wire import Ask, Facts
from fedstill.server.link import LocalLink
from fedstill.strategies import all_verbs

from .conftest import Federation, streams

Make = Callable[..., Federation]
Small = Callable[..., RunConfig]
QUICK = ("report.alone=false", "report.centralized=false", "exchange.quorum=0.5", "method.distill_epochs=1")
SAFE = {"query.predictions", "query.logits", "query.scores", "query.save", "query.restore", "train.local",
        "train.distil", "train.feedback", "query.keys", "query.shares", "query.unmask"}  # fmt: skip
NOISE = "sites.north.privacy={epsilon = 50.0, noise_multiplier = 4.0, clip = 2.0}"


def lines(made: Federation, site: str) -> list[Facts]:
    return [json.loads(line) for line in (made.folder / "sites" / site / "ledger.jsonl").read_text().splitlines()]


def test_a_site_hides_its_predictions_and_the_run_shows_what_it_spent(federation: Make, small: Small) -> None:
    made = federation(small(*QUICK, NOISE, "method.name=ds-fl", "rounds=1"))
    summary = made.run()
    told = summary["sites"]["north"]["privacy"]
    assert (told["predictions"], told["noise_multiplier"], told["clip"]) == (40, 4.0, 2.0)
    assert 0 < told["epsilon"] < 50
    assert told["left"] == pytest.approx(50 - told["epsilon"])
    assert made.events("privacy")[0]["sites"] == {"north": told}
    assert "privacy" not in summary["sites"]["south"]
    assert summary["sites"]["north"]["after"] is None  # scores of its model would be answers without noise
    assert summary["sites"]["south"]["after"]["accuracy"] >= 0
    assert not made.events("left_out")


def test_what_leaves_is_in_the_ledger_before_it_leaves(federation: Make, small: Small) -> None:
    made = federation(small(*QUICK, NOISE, "method.name=ds-fl", "rounds=1"))
    with streams(made) as link:
        made.run(link)
    for site in ("north", "south"):
        found = lines(made, site)
        verbs = [line["verb"] for line in found]
        tested = ["evaluate.test"] if site == "south" else []  # whoever hides is not tested either
        steps = ["query.save", "train.local", "query.predictions", "train.distil"]
        assert verbs == [*tested, *steps, *tested, "query.save"]
        predicted = found[verbs.index("query.predictions")]
        assert predicted["arrays"]["logits"] == {"type": "float32", "shape": [40, 2], "bytes": 320}
        assert predicted["bytes"] > 328
        assert (predicted["run"], predicted["round"]) == ("run", 1)
        assert (predicted["privacy"] is not None) == (site == "north")
        assert ("loss" in found[verbs.index("train.local")]["metrics"]) == (site == "south")
        sent = sum(line["bytes"] for line in found)
        arrays = sum(kind["bytes"] for line in found for kind in line["arrays"].values())
        travelled = made.federation.link.traffic()[site][0]
        assert arrays < sent < travelled
        assert travelled - arrays < 128 * len(found)  # the rest is heads: no array left that the ledger does not name


def test_a_ledger_that_cannot_be_written_keeps_everything_at_the_site(federation: Make, small: Small) -> None:
    node = federation(small()).nodes[0]
    node.ledger.path = Path("/dev/full/ledger.jsonl")
    with pytest.raises(LedgerError, match="nothing leaves this site"):
        node.answer(Ask("query.predictions", {"rows": np.arange(4)}))


def test_a_spent_budget_is_a_refusal_with_a_reason_in_this_run_and_in_the_next(federation: Make, small: Small) -> None:
    few = "sites.north.privacy={epsilon = 3.0, predictions = 40}"
    made = federation(small(*QUICK, few, "method.name=ds-fl"), "site")
    summary = made.run()
    assert summary["status"] == "finished"
    assert summary["sites"]["north"]["privacy"]["epsilon"] == pytest.approx(3.0, abs=0.05)
    [left] = made.events("left_out")  # in the second of two rounds
    assert (left["site"], left["round"]) == ("north", 2)
    assert "BudgetSpent: this site's privacy budget is spent: 40 more predictions" in left["reason"]
    [refused] = [line for line in lines(made, "north") if "refused" in line]
    assert (refused["verb"], refused["round"]) == ("query.predictions", 2)
    assert "arrays" not in refused
    again = federation(small(*QUICK, few, "method.name=ds-fl", "rounds=1", "seed=2"), "site")
    again.run(LocalLink(again.nodes))
    assert [event["site"] for event in again.events("left_out")] == ["north", "north"]


def test_only_predictions_leave_a_site_that_hides_them(federation: Make, small: Small) -> None:
    node = federation(small(NOISE)).nodes[0]
    before = node.learner.weights()
    for verb in sorted(set(all_verbs()) - SAFE):
        with pytest.raises(ValueError, match=rf"this site has \[privacy\], and {verb} is not declared safe under it"):
            node.answer(Ask(verb, settings={"epochs": 1}))
    assert all(np.array_equal(value, before[name]) for name, value in node.learner.weights().items())
    reply = node.answer(Ask("train.local", settings={"epochs": 1}))
    assert (reply.arrays, reply.metrics) == ({}, {"texts": len(node.private)})


def test_whoever_plants_a_model_learns_no_word_of_the_private_texts(federation: Make, small: Small) -> None:
    """The review's attack: move one word's embedding, and look for a difference in anything that comes back."""
    node = federation(small(NOISE)).nodes[0]
    words = node.learner.weights()
    table = next(name for name in words if "word_embeddings" in name)
    present = int(node.private.batch(np.arange(1))["input_ids"][0, 1])
    planted = {name: value.copy() for name, value in words.items()}
    planted[table][present] += 50.0
    for verb in ("train.weights", "evaluate.test", "evaluate.alone"):
        with pytest.raises(ValueError, match=r"not declared safe"):
            node.answer(Ask(verb, planted if verb == "train.weights" else {}, {"epochs": 1}))
    rows, place = {"rows": np.arange(40)}, {"round": 1, "step": 1}
    said = []
    for weights in (words, words, planted):  # the same model twice, and one that differs where the word is
        reply = node.answer(Ask("train.local", weights, {"epochs": 1, "fresh": True, **place}))
        assert set(reply.metrics) == {"texts"}
        said.append(node.answer(Ask("query.predictions", rows, place)).arrays["logits"])
    same, moved = np.abs(said[0] - said[1]).mean(), np.abs(said[0] - said[2]).mean()
    assert not np.array_equal(said[0], said[1])  # noise that came back would tell which models are the same
    assert moved < 1.5 * same  # and the noise, of deviation 16, covers the rest


def test_a_word_that_is_not_a_number_shows_in_no_prediction(federation: Make, small: Small) -> None:
    node = federation(small(NOISE)).nodes[0]
    weights = {name: value.copy() for name, value in node.learner.weights().items()}
    table = next(name for name in weights if "word_embeddings" in name)
    weights[table][int(node.public.batch(np.arange(1))["input_ids"][0, 1])] = np.nan
    node.learner.load_weights(weights)
    assert not np.isfinite(node.learner.predict(node.public, np.arange(40))).all()
    for ask in (Ask("query.predictions", {"rows": np.arange(40)}), Ask("query.logits", {"rows": np.arange(8)})):
        assert np.isfinite(node.answer(ask).arrays["logits"]).all()


def test_the_noise_is_fresh_for_every_answer_and_every_answer_costs(federation: Make, small: Small) -> None:
    ask = Ask("query.predictions", {"rows": np.arange(40)}, {"round": 1, "step": 1})
    node = federation(small(NOISE)).nodes[0]
    open_ = federation(small()).nodes[0].answer(ask).arrays["logits"]
    first, again = node.answer(ask), node.answer(ask)
    assert not np.any(first.arrays["logits"] == again.arrays["logits"])
    assert np.std(first.arrays["logits"] - open_) == pytest.approx(2 * 2.0 * 4.0, rel=0.4)
    assert (first.metrics["privacy"]["predictions"], again.metrics["privacy"]["predictions"]) == (40, 80)
    assert again.metrics["privacy"]["epsilon"] > first.metrics["privacy"]["epsilon"]


def test_an_error_at_a_site_with_noise_keeps_its_text_to_itself(
    federation: Make, small: Small, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = federation(small(NOISE))

    def leak(*_: object) -> None:
        raise KeyError("row 17 says: the patient")

    for node in made.nodes:
        monkeypatch.setattr(node, "train_privately", leak)
    with pytest.raises(Failed, match=r"train\.local failed; the site's own log says why"):
        made.nodes[0].answer(Ask("train.local", settings={"epochs": 1}))
    assert "the patient" in lines(made, "north")[-1]["refused"]  # in the site's own ledger it is
    with pytest.raises(KeyError, match="the patient"):
        made.nodes[1].answer(Ask("train.local", settings={"epochs": 1}))


def test_the_site_decides_fedaux_epsilon_and_pays_for_its_scores(federation: Make, small: Small) -> None:
    node = federation(small(NOISE)).nodes[0]
    settings = {"extractor": "tiny-bert", "regulariser": 0.01, "per_text": True, "delta": 1e-5}
    asked = {"rows": np.arange(30), "negatives": np.arange(30, 40)}
    for epsilon in (None, 1e9):
        reply = node.answer(Ask("query.scores", asked, {**settings, "epsilon": epsilon}))
    assert reply.metrics["privacy"]["predictions"] == 2  # one use of the Gaussian mechanism each
    again = node.answer(Ask("query.scores", asked, {**settings, "epsilon": None}))
    assert not np.array_equal(reply.arrays["scores"], again.arrays["scores"])
    with pytest.raises(ValueError, match="bounds nothing"):
        node.answer(Ask("query.scores", asked, {**settings, "epsilon": None, "regulariser": 1e-12}))
