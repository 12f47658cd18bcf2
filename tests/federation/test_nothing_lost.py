"""Nothing that a round has finished is lost: damaged checkpoints, too few sites, ledgers in the run's record."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fedstill.client.release.ledger import verify
from fedstill.common.config import RunConfig
from fedstill.common.config.files import load_run
from fedstill.common.wire import Ask, Reply
from fedstill.strategies.base import QuorumLost
from tests.conftest import SMALL

from .conftest import Federation, spoil

Make = Callable[..., Federation]
Small = Callable[..., RunConfig]
QUICK = ("report.alone=false", "report.centralized=false", "report.evaluate=end", "method.name=ds-fl",
         "method.distill_epochs=1", "data.public=16")  # fmt: skip


def test_a_damaged_checkpoint_of_one_site_costs_one_round(federation: Make, small: Small) -> None:
    whole = federation(small(*QUICK, "rounds=3"))
    whole.run()
    cut = federation(small(*QUICK, "rounds=3"), "cut")

    def ends(ask: Ask, reply: Reply) -> Reply:
        if ask.settings.get("round") == 3:
            raise RuntimeError("power cut")
        return reply

    spoil(cut.nodes[0], ends)
    with pytest.raises(QuorumLost):
        cut.run()
    file = cut.folder / "sites/south/run/checkpoints/round-00002/arrays.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    again = federation(small(*QUICK, "rounds=3"), "cut")
    assert again.nodes[1].greeting()["rounds"] == [0, 1]
    again.run(resume=True)
    assert again.events("resumed")[0]["round"] == 1  # and at the default quorum, which is all of them
    assert again.weights() == whole.weights()


def test_the_quorum_counts_the_rounds_sites_and_not_who_is_left_of_them(tmp_path: Path) -> None:
    more = "".join(f'[[sites]]\nname = "{name}"\nmodel = "tiny-bert"\n' for name in ("east", "west"))
    text = SMALL.replace("[exchange]", f"{more}[exchange]")
    made = Federation(load_run(text, (*QUICK, "exchange.quorum=0.5", "rounds=1")), tmp_path)

    def fails(verb: str) -> Callable[[Ask, Reply], Reply]:
        def answer(ask: Ask, reply: Reply) -> Reply:
            if ask.verb == verb:
                raise RuntimeError("not today")
            return reply

        return answer

    for node, verb in zip(made.nodes, ("train.local", "train.local", "query.predictions"), strict=False):
        spoil(node, fails(verb))
    with pytest.raises(QuorumLost, match=r"query\.predictions: 1 of 2 sites gave a usable answer and 2 are needed"):
        made.run()


def test_a_site_that_alone_has_to_save_or_restore_ends_no_run(federation: Make, small: Small) -> None:
    """Where a round draws one of two sites, only that one saves; the other one holds what it held."""
    drawn = (*QUICK, "method.participation=0.5", "exchange.quorum=0.5")
    made = federation(small(*drawn, "rounds=4"), "drawn")
    trained = {"north": 0, "south": 0}

    def refuses(ask: Ask, reply: Reply) -> Reply:
        if ask.verb in ("query.save", "query.restore"):
            raise RuntimeError("not today")
        trained[reply.node] += ask.verb == "train.local"
        return reply

    spoil(made.nodes[1], refuses)
    assert made.run()["status"] == "finished"
    assert trained["south"]  # in a round of its own
    again = federation(small(*drawn, "rounds=6"), "drawn")
    spoil(again.nodes[1], refuses)
    assert again.run(resume=True)["status"] == "finished"


def test_every_rounds_record_has_what_the_ledgers_had_come_to(federation: Make, small: Small) -> None:
    made = federation(small(*QUICK, "rounds=1"))
    made.run()
    events = made.events("ledgers")
    assert [event["round"] for event in events] == [0, 1]
    for event in events:
        for site, head in event["heads"].items():
            verify(made.folder / "sites" / site / "ledger.jsonl", head)
