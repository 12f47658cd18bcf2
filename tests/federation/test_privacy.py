"""A site's noise, budget and ledger in whole runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fedstill.client.release.ledger import LedgerError
from fedstill.common.config import RunConfig
from fedstill.common.wire import Ask, Facts
from fedstill.server.link import LocalLink

from .conftest import Federation, streams

Make = Callable[..., Federation]
Small = Callable[..., RunConfig]
QUICK = ("report.alone=false", "report.centralized=false", "exchange.quorum=0.5", "method.distill_epochs=1")
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


def test_what_leaves_is_in_the_ledger_before_it_leaves(federation: Make, small: Small) -> None:
    made = federation(small(*QUICK, NOISE, "method.name=ds-fl", "rounds=1"))
    with streams(made) as link:
        made.run(link)
    for site in ("north", "south"):
        found = lines(made, site)
        verbs = [line["verb"] for line in found]
        assert verbs == ["evaluate.test", "query.save", "train.local", "query.predictions", "train.distil",
                         "evaluate.test", "query.save"]  # fmt: skip
        predicted = found[verbs.index("query.predictions")]
        assert predicted["arrays"]["logits"] == {"type": "float32", "shape": [40, 2], "bytes": 320}
        assert predicted["bytes"] > 328
        assert (predicted["run"], predicted["round"]) == ("run", 1)
        assert (predicted["privacy"] is not None) == (site == "north")
        assert ("loss" in found[2]["metrics"]) == (site == "south")
        sent = sum(line["bytes"] for line in found)
        assert (
            0.5 < sent / made.federation.link.traffic()[site][0] < 1
        )  # the rest is the greeting and the frames' prefixes


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
    with pytest.raises(ValueError, match=r"lets predictions out and nothing else; train\.parameters would send"):
        node.answer(Ask("train.parameters", settings={"epochs": 1}))
    with pytest.raises(ValueError, match="would send 'counts'"):
        node.answer(Ask("query.counts"))
    with pytest.raises(ValueError, match="does not let 'class_losses'"):
        node.answer(Ask("train.described", settings={"epochs": 1}))
    reply = node.answer(Ask("train.local", settings={"epochs": 1}))
    assert set(reply.metrics) == {"texts", "seconds"}


def test_the_noise_does_not_follow_from_the_seed_and_is_not_drawn_twice(federation: Make, small: Small) -> None:
    ask = Ask("query.predictions", {"rows": np.arange(40)}, {"round": 1, "step": 1})
    one, two = (federation(small(NOISE)).nodes[0] for _ in range(2))  # the same seed, two secrets
    open_ = federation(small()).nodes[0].answer(ask).arrays["logits"]
    first, other = one.answer(ask).arrays["logits"], two.answer(ask).arrays["logits"]
    assert np.array_equal(first, one.answer(ask).arrays["logits"])  # asked again: nothing new to average
    assert not np.allclose(first, other)
    assert np.std(first - open_) == pytest.approx(2 * 2.0 * 4.0, rel=0.4)
