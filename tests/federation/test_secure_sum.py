"""Secure sums in whole runs: the plain result, uniform transcripts, sites that drop, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedstill.client.node import Node
from fedstill.common.config import ConfigError, RunConfig
from fedstill.common.config.files import load_run
from fedstill.common.wire import Ask, Reply
from fedstill.strategies.secure_sum import Masking, under_masks
from tests.conftest import SMALL

from .conftest import Federation, spoil, streams

QUICK = ("report.alone=false", "report.centralized=false", "report.evaluate=end", "data.public=16", "rounds=1",
         "data.private=80", "exchange.quorum=0.5")  # fmt: skip
ALIKE = ("sites.south.model=tiny-bert",)
METHODS = {
    "fedavg": ALIKE,
    "fedprox": ALIKE,
    "fedadam": ALIKE,
    "fedbn": ALIKE,
    "ds-fl": ("method.distill_epochs=1",),
    "fedid": ("method.distill_epochs=1",),
    "mhat": ("method.distill_epochs=1", "method.loss=kl"),
    "adafd": ("method.distill_epochs=1", "method.weighting=enwc", "method.beta=1.0"),
}


def run_of(sites: int, *changes: str) -> RunConfig:
    names = [f"site{number}" for number in range(sites - 2)]
    more = "".join(f'[[sites]]\nname = "{name}"\nmodel = "tiny-bert"\n' for name in names)
    return load_run(SMALL.replace("[exchange]", f"{more}[exchange]"), [*QUICK, *changes])


def overhear(node: Any) -> list[tuple[Ask, Reply]]:
    heard: list[tuple[Ask, Reply]] = []

    def keep(ask: Ask, reply: Reply) -> Reply:
        heard.append((ask, reply))
        return reply

    spoil(node, keep)
    return heard


@pytest.mark.parametrize("method", METHODS)
def test_the_result_is_the_plain_runs_to_the_precision_of_fixed_point(method: str, tmp_path: Path) -> None:
    changes = (f"method.name={method}", *METHODS[method])
    plain = Federation(run_of(3, *changes), tmp_path / "plain")
    secure = Federation(run_of(3, *changes, "exchange.secure=true"), tmp_path / "secure")
    heard = overhear(secure.nodes[0])
    plain.run()
    secure.run()
    for name, value in plain.central.weights().items():
        assert np.allclose(value, secure.central.weights()[name], atol=2e-6), name
    floats = [name for ask, reply in heard for name, value in reply.arrays.items() if value.dtype.kind == "f"]
    assert not floats  # nothing that is a fraction has left this site
    assert "mask" in {key for ask, _ in heard for key in ask.settings}


def test_what_one_site_sends_is_uniform(tmp_path: Path) -> None:
    made = Federation(run_of(3, "method.name=fedavg", *ALIKE, "exchange.secure=true"), tmp_path)
    heard = overhear(made.nodes[0])
    made.run()
    [sent] = [reply.arrays for ask, reply in heard if ask.verb == "train.parameters"]
    numbers = np.concatenate([value.reshape(-1).view(np.uint64) for value in sent.values()])
    assert len(numbers) > 10_000
    for shift in (56, 32, 8, 0):  # every byte that could hold a weight's sign, size or last digits
        counts = np.bincount(((numbers >> np.uint64(shift)) & np.uint64(255)).astype(np.int64), minlength=256)
        expected = len(numbers) / 256
        chi_square = float(((counts - expected) ** 2 / expected).sum())
        assert chi_square < 255 + 6 * np.sqrt(2 * 255)


def test_two_of_five_sites_drop_out_and_the_sum_is_of_the_three(tmp_path: Path) -> None:
    changes = ("method.name=fedavg", *ALIKE)
    secure = Federation(run_of(5, *changes, "exchange.secure=true"), tmp_path / "secure")
    plain = Federation(run_of(5, *changes), tmp_path / "plain")

    def drops(ask: Ask, reply: Reply) -> Reply:
        if ask.verb == "train.parameters":
            raise RuntimeError("gone")
        return reply

    for made in (secure, plain):
        for node in made.nodes[1:3]:
            spoil(node, drops)
        assert made.run()["status"] == "finished"
    for name, value in plain.central.weights().items():
        assert np.allclose(value, secure.central.weights()[name], atol=2e-6), name
    assert {event["site"] for event in secure.events("left_out")} == {"south", "site0"}


@pytest.mark.parametrize("verb", ["query.keys", "query.shares"])
def test_a_site_that_drops_out_while_keys_are_agreed_is_left_out(tmp_path: Path, verb: str) -> None:
    made = Federation(run_of(4, "method.name=ds-fl", "method.distill_epochs=1", "exchange.secure=true"), tmp_path)

    def drops(ask: Ask, reply: Reply) -> Reply:
        if ask.verb == verb:
            raise RuntimeError("gone")
        return reply

    spoil(made.nodes[1], drops)
    assert made.run()["status"] == "finished"


def test_over_real_streams_and_an_answer_of_another_form_spoils_nothing(tmp_path: Path) -> None:
    made = Federation(run_of(4, "method.name=ds-fl", "method.distill_epochs=1", "exchange.secure=true"), tmp_path)

    def short(ask: Ask, reply: Reply) -> Reply:
        if ask.verb == "query.predictions":
            return Reply(reply.node, {**reply.arrays, "logits": reply.arrays["logits"][:3]}, reply.metrics)
        return reply

    spoil(made.nodes[1], short)
    with streams(made) as link:
        assert made.run(link)["status"] == "finished"
    assert {event["site"] for event in made.events("left_out")} == {"south"}


# --- what a hostile coordinator tries ---


@pytest.fixture
def three(tmp_path: Path) -> list[Node]:
    return Federation(run_of(3, "method.name=ds-fl", "exchange.secure=true"), tmp_path).nodes


def prepared(nodes: list[Node]) -> tuple[dict[str, Any], list[np.ndarray]]:
    keys = [node.answer(Ask("query.keys")).arrays for node in nodes]
    arrays = {kind: np.stack([key[kind] for key in keys]) for kind in ("channel", "mask")}
    peers = {"names": [node.name for node in nodes], "threshold": 2}
    sealed = [node.answer(Ask("query.shares", arrays, peers)).arrays["sealed"] for node in nodes]
    return peers, sealed


def test_a_sum_is_opened_once_and_never_for_a_site_both_ways(three: list[Node]) -> None:
    peers, sealed = prepared(three)
    mask = {"weight": 0.3, "of": "values"}
    for node in three:
        node.answer(Ask("query.predictions", {"rows": np.arange(4)}, {"mask": mask}))
    for_first = {"sealed": np.stack([sealed[other][0] for other in range(3)])}
    three[0].answer(Ask("query.unmask", for_first, {"alive": peers["names"]}))
    with pytest.raises(ValueError, match="no sum to open, or it was opened before"):
        three[0].answer(Ask("query.unmask", for_first, {"alive": peers["names"][:2]}))  # now the third one's masks
    with pytest.raises(ValueError, match="too few to open"):
        three[1].answer(Ask("query.unmask", {"sealed": np.stack([s[1] for s in sealed])}, {"alive": ["south"]}))


def test_masks_serve_once_and_a_sum_of_two_hides_nothing(three: list[Node]) -> None:
    prepared(three)
    ask = Ask("query.predictions", {"rows": np.arange(4)}, {"mask": {"weight": 0.3, "of": "values"}})
    three[0].answer(ask)
    with pytest.raises(ValueError, match="serve once"):
        three[0].answer(ask)
    keys = [node.answer(Ask("query.keys")).arrays for node in three[:2]]
    arrays = {kind: np.stack([key[kind] for key in keys]) for kind in ("channel", "mask")}
    with pytest.raises(ValueError, match="a sum of 2 sites would not hide"):
        three[0].answer(Ask("query.shares", arrays, {"names": ["north", "south"], "threshold": 2}))


def test_other_keys_than_its_own_and_low_thresholds_are_refused(three: list[Node]) -> None:
    keys = [node.answer(Ask("query.keys")).arrays for node in three]
    arrays = {kind: np.stack([key[kind] for key in keys]) for kind in ("channel", "mask")}
    names = [node.name for node in three]
    with pytest.raises(ValueError, match="could open two different sums"):
        three[0].answer(Ask("query.shares", arrays, {"names": names, "threshold": 1}))
    with pytest.raises(ValueError, match="not the ones that it made"):
        three[0].answer(Ask("query.shares", {**arrays, "mask": arrays["mask"][::-1]}, {"names": names, "threshold": 2}))


def test_a_site_may_let_nothing_out_but_sums(tmp_path: Path) -> None:
    made = Federation(run_of(3, "sites.north.limits={sums_only = true}"), tmp_path)
    with pytest.raises(RuntimeError, match=r"limits\.sums_only lets answers out in secure sums only"):
        made.nodes[0].answer(Ask("query.predictions", {"rows": np.arange(4)}))
    made.nodes[0].answer(Ask("train.local", settings={"epochs": 1}))


@pytest.mark.parametrize("change", ["method.name=fedmedian", "method.name=fedkd", "method.aggregation=median"])
def test_methods_that_need_single_answers_are_refused(change: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"exchange\.secure: .*choose another method"):
        Federation(run_of(3, *ALIKE, change, "exchange.secure=true"), tmp_path)


def test_secure_sums_need_a_stream() -> None:
    for other in ("exchange.link=messages", "exchange.predictions=int8"):
        with pytest.raises(ConfigError, match="secure = true needs"):
            run_of(3, "exchange.secure=true", other)


def test_an_answer_leaves_only_after_masks_were_agreed(three: list[Node]) -> None:
    three[0].masking = Masking()
    with pytest.raises(ValueError, match="agreed on before"):
        under_masks(three[0], {"logits": np.zeros((2, 2), np.float32)}, {"weight": 1.0, "of": "values"})
