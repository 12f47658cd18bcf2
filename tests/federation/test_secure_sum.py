"""Secure sums in whole runs: the plain result, uniform transcripts, sites that drop, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedstill.client.node import Node
from fedstill.common.config import ConfigError, RunConfig, SiteFile
from fedstill.common.config.files import load_run
from fedstill.common.maths.masking import expand, from_fixed, join
from fedstill.common.wire import Ask, Reply
from fedstill.deploy.coordinator import keys as site_keys
from fedstill.strategies.secure_sum import Masking, Peers, agreed, under_masks
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

TWO = {"names": ["north", "south"], "weights": [0.5, 0.5]}


@pytest.fixture
def three(tmp_path: Path) -> list[Node]:
    return Federation(run_of(3, "method.name=ds-fl", "exchange.secure=true"), tmp_path).nodes


def prepared(nodes: list[Node]) -> tuple[dict[str, Any], list[np.ndarray]]:
    keys = [node.answer(Ask("query.keys")).arrays for node in nodes]
    arrays = {kind: np.stack([key[kind] for key in keys]) for kind in ("channel", "mask")}
    peers = {"names": [node.name for node in nodes], "threshold": 2, "weights": [0.3, 0.3, 0.3]}
    sealed = [node.answer(Ask("query.shares", arrays, peers)).arrays["sealed"] for node in nodes]
    return peers, sealed


def test_a_sum_is_opened_once_and_never_for_a_site_both_ways(three: list[Node]) -> None:
    peers, sealed = prepared(three)
    mask = {"of": "values"}
    for node in three:
        node.answer(Ask("query.predictions", {"rows": np.arange(4)}, {"mask": mask}))
    for_first = {"sealed": np.stack([sealed[other][0] for other in range(3)])}
    three[0].answer(Ask("query.unmask", for_first, {"alive": peers["names"]}))
    with pytest.raises(ValueError, match="no sum to open, or it was opened before"):
        three[0].answer(Ask("query.unmask", for_first, {"alive": peers["names"][:2]}))  # now the third one's masks
    with pytest.raises(ValueError, match="too few to open"):
        three[1].answer(Ask("query.unmask", {"sealed": np.stack([s[1] for s in sealed])}, {"alive": ["south"]}))


def test_a_site_gives_one_kind_of_share_of_each_other(three: list[Node]) -> None:
    """Both kinds open that site's part: of who answered, the share of its own mask; of who is lost, of its pairs'."""
    peers, sealed = prepared(three)
    for node in three:
        node.answer(Ask("query.predictions", {"rows": np.arange(4)}, {"mask": {"of": "values"}}))
    own, pairs = [], []
    for row, node in enumerate(three[:2]):
        assert node.masking is not None
        masking, mine = node.masking, {"sealed": np.stack([s[row] for s in sealed])}
        own.append(node.answer(Ask("query.unmask", mine, {"alive": peers["names"][:2]})).arrays["shares"])
        pairs.append(masking.mask.private_bytes_raw())
    shares = {row: {n: int.from_bytes(bytes(own[n - 1][row])) for n in (1, 2)} for row in range(3)}
    third = three[2].masking
    assert third is not None
    secrets = [join(shares[row]) for row in range(3)]
    assert secrets[2] == int.from_bytes(third.mask.private_bytes_raw())  # it dropped out: its pairs' masks
    assert secrets[2] != int.from_bytes(third.own)
    assert secrets[0] != int.from_bytes(pairs[0])  # the others did not
    assert secrets[1] != int.from_bytes(pairs[1])


def test_shares_that_were_changed_on_the_way_open_nothing(three: list[Node]) -> None:
    peers, sealed = prepared(three)
    for node in three:
        node.answer(Ask("query.predictions", {"rows": np.arange(4)}, {"mask": {"of": "values"}}))
    for_first = np.stack([sealed[other][0] for other in range(3)])
    for_first[1, 5] ^= 1
    with pytest.raises(ValueError, match="the shares of south were changed on the way"):
        three[0].answer(Ask("query.unmask", {"sealed": for_first}, {"alive": peers["names"]}))


def test_whole_numbers_are_not_summed(three: list[Node]) -> None:
    prepared(three)
    with pytest.raises(ValueError, match="whole numbers, which are not summed"):
        under_masks(three[0], {"counts": np.arange(3)}, {"of": "values"})


def test_a_site_that_sends_its_answer_open_is_left_out(tmp_path: Path) -> None:
    made = Federation(run_of(4, "method.name=ds-fl", "method.distill_epochs=1", "exchange.secure=true"), tmp_path)

    def openly(ask: Ask, reply: Reply) -> Reply:
        if ask.verb == "query.predictions":
            return Reply(reply.node, {**reply.arrays, "logits": np.zeros((16, 2), np.float32)}, reply.metrics)
        return reply

    spoil(made.nodes[1], openly)
    assert made.run()["status"] == "finished"
    [left] = made.events("left_out")
    assert (left["site"], left["reason"]) == ("south", "an answer to be summed came without its masks")


def test_masks_serve_once_and_a_sum_of_two_hides_nothing(three: list[Node]) -> None:
    prepared(three)
    ask = Ask("query.predictions", {"rows": np.arange(4)}, {"mask": {"of": "values"}})
    three[0].answer(ask)
    with pytest.raises(ValueError, match="serve once"):
        three[0].answer(ask)
    keys = [node.answer(Ask("query.keys")).arrays for node in three[:2]]
    arrays = {kind: np.stack([key[kind] for key in keys]) for kind in ("channel", "mask")}
    with pytest.raises(ValueError, match="a sum of 2 sites would not hide"):
        three[0].answer(Ask("query.shares", arrays, {**TWO, "threshold": 2}))


def test_other_keys_than_its_own_and_low_thresholds_are_refused(three: list[Node]) -> None:
    keys = [node.answer(Ask("query.keys")).arrays for node in three]
    arrays = {kind: np.stack([key[kind] for key in keys]) for kind in ("channel", "mask")}
    peers = {"names": [node.name for node in three], "weights": [0.3, 0.3, 0.3]}
    with pytest.raises(ValueError, match="could open two different sums"):
        three[0].answer(Ask("query.shares", arrays, {**peers, "threshold": 1}))
    with pytest.raises(ValueError, match="not the ones that it made"):
        three[0].answer(Ask("query.shares", {**arrays, "mask": arrays["mask"][::-1]}, {**peers, "threshold": 2}))


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
        under_masks(three[0], {"logits": np.zeros((2, 2), np.float32)}, {"of": "values"})


@pytest.mark.parametrize(
    ("weights", "limits", "refused"),
    [
        ([1.0, 0.0, 0.0], {}, True),  # the sum would be its part alone
        ([0.9, 0.05, 0.05], {}, True),
        ([0.9, 0.05, 0.05], {"least_weight": 0.05}, False),
        ([0.5, 0.1, 0.4], {}, False),
        ([0.0, 0.5, 0.5], {}, False),  # a site without texts has nothing in it
        ([0.3, -0.3, 0.3], {}, True),
        ([0.3, 0.3, 2.0], {}, True),
        ([0.5, 0.5], {}, True),
    ],
)
def test_a_sum_of_one_part_and_next_to_nothing_is_refused(
    weights: list[float], limits: dict[str, float], refused: bool, three: list[Node]
) -> None:
    three[0].site = three[0].site.model_copy(update={"limits": three[0].site.limits.model_copy(update=limits)})
    keys = [node.answer(Ask("query.keys")).arrays for node in three]
    arrays = {kind: np.stack([key[kind] for key in keys]) for kind in ("channel", "mask")}
    ask = Ask("query.shares", arrays, {"names": [n.name for n in three], "threshold": 2, "weights": weights})
    if refused:
        with pytest.raises(ValueError, match=r"would not hide its part; take weights|a weight from 0 to 1 for each"):
            three[0].answer(ask)
    else:
        three[0].answer(ask)


@pytest.mark.parametrize("last", [[0.4, 0.3, 0.3], [0.3, 0.3, 0.4]])
def test_masks_cancel_only_if_every_site_was_told_the_same(last: list[float], three: list[Node]) -> None:
    """Who is told of a sum with fair weights must not be in one that gives him all of it."""
    keys = [node.answer(Ask("query.keys")).arrays for node in three]
    arrays = {kind: np.stack([key[kind] for key in keys]) for kind in ("channel", "mask")}
    names = [node.name for node in three]
    sent, masks = [], []
    for node, weights in zip(three, ([0.4, 0.3, 0.3], [0.4, 0.3, 0.3], last), strict=True):
        node.answer(Ask("query.shares", arrays, {"names": names, "threshold": 2, "weights": weights}))
        assert node.masking is not None
        masks.append(node.masking.own)
        sent.append(node.answer(Ask("query.predictions", {"rows": np.arange(4)}, {"mask": {"of": "values"}})))
    total = sum(reply.arrays["logits"].reshape(-1).view(np.uint64) for reply in sent)
    total = total - sum(expand(own, "logits", 8) for own in masks)  # even with every site's own mask
    if last == [0.4, 0.3, 0.3]:
        rows = np.arange(4)
        parts = [w * node.learner.predict(node.public, rows) for w, node in zip(last, three, strict=True)]
        assert np.allclose(from_fixed(total), sum(parts).reshape(-1), atol=1e-5)
    else:
        assert np.abs(from_fixed(total)).min() > 1000  # what does not cancel is uniform on 64 bits


def signed(folder: Path, changes: tuple[str, ...] = (), sites: int = 3) -> RunConfig:
    """A run whose sites have keys, and each other's public halves from their owners."""
    config = run_of(sites, "method.name=ds-fl", "method.distill_epochs=1", "exchange.secure=true", *changes)
    owned = []
    for site in config.sites:
        site_keys.new_key(folder / "keys" / site.name)
        (folder / "peers").mkdir(exist_ok=True)
        (folder / "keys" / f"{site.name}.pub").rename(folder / "peers" / f"{site.name}.pub")
        own = {"private_key": folder / "keys" / site.name, "peers": folder / "peers"}
        owned.append(SiteFile.model_validate({**site.model_dump(exclude_unset=True), **own}))
    return config.model_copy(update={"sites": owned})


class Between:
    """A coordinator that answers one site in the names of all the others, with keys of its own."""

    def __init__(self, victim: Node, names: list[str], settings: dict[str, Any]) -> None:
        self.victim, self.names, self.settings = victim, names, settings
        self.others = {name: Masking() for name in names[1:]}

    def part(self) -> np.ndarray:
        """What the victim's masked answer hides, to whoever holds all the other keys."""
        own = self.victim.answer(Ask("query.keys", {}, {"round": 1, "step": 1}))
        public = {
            "channel": [m.channel.public_key().public_bytes_raw() for m in self.others.values()],
            "mask": [m.mask.public_key().public_bytes_raw() for m in self.others.values()],
        }
        arrays = {
            kind: np.stack([own.arrays[kind], *(np.frombuffer(key, np.uint8) for key in found)])
            for kind, found in public.items()
        }
        facts: dict[str, Any] = {"names": self.names, "threshold": 2, "weights": [0.3] * 3, **self.settings}
        facts["signatures"] = [own.metrics.get("signature", ""), *facts.get("signatures", ["", ""])]
        self.victim.answer(Ask("query.shares", arrays, {**facts, "round": 1, "step": 1}))
        ask = Ask("query.predictions", {"rows": np.arange(4)}, {"mask": {"of": "values"}, "round": 1, "step": 1})
        hidden = self.victim.answer(ask).arrays["logits"].reshape(-1).view(np.uint64)
        peers = Peers(self.names, 2, [0.3] * 3, arrays["channel"], arrays["mask"], facts["signatures"])
        for masking in self.others.values():  # the victim is the first, and adds every pair's mask
            hidden = hidden - expand(agreed(masking.mask, arrays["mask"][0], peers.told()), "logits", len(hidden))
        assert self.victim.masking is not None
        # its own mask's shares were sealed for keys that the coordinator has: two of three are enough
        return np.asarray(from_fixed(hidden - expand(self.victim.masking.own, "logits", len(hidden))) / 0.3)


def test_keys_that_the_coordinator_exchanged_are_not_taken(tmp_path: Path) -> None:
    plain = Federation(run_of(3, "method.name=ds-fl", "exchange.secure=true"), tmp_path / "plain").nodes[0]
    honest = plain.learner.predict(plain.public, np.arange(4)).reshape(-1)
    names = ["north", "south", "site0"]
    assert np.allclose(Between(plain, names, {}).part(), honest, atol=1e-5)  # without peers the attack works
    nodes = Federation(signed(tmp_path), tmp_path / "signed").nodes
    place = {"round": 1, "step": 1}
    true = [node.answer(Ask("query.keys", {}, place)).metrics["signature"] for node in nodes[1:]]
    for lies in (
        {},
        {"signatures": true},
        {"signatures": ["AAAA", "!"]},
        {"names": ["north", "../peers/south", "x"], "signatures": true},
    ):
        with pytest.raises(ValueError, match="agreed on before the answer"):  # it has left the sum
            Between(nodes[0], names, lies).part()


def test_a_signature_is_for_one_sum(tmp_path: Path) -> None:
    """Keys of an earlier sum, whose secrets a drop-out has opened, are no keys of a later one."""
    nodes = Federation(signed(tmp_path), tmp_path / "run").nodes

    def shares(place: dict[str, int], first: list[Reply], rest: list[Reply]) -> list[str]:
        keys = [*first, *rest]
        arrays = {kind: np.stack([key.arrays[kind] for key in keys]) for kind in ("channel", "mask")}
        facts = {"names": [n.name for n in nodes], "threshold": 2, "weights": [0.3] * 3}
        facts["signatures"] = [key.metrics["signature"] for key in keys]
        found: list[str] = nodes[0].answer(Ask("query.shares", arrays, {**facts, **place})).metrics.get("strangers", [])
        return found

    one, two = {"round": 1, "step": 1}, {"round": 1, "step": 2}
    before = [node.answer(Ask("query.keys", {}, one)) for node in nodes]
    assert shares(one, before[:1], before[1:]) == []
    now = [node.answer(Ask("query.keys", {}, two)) for node in nodes]
    assert shares(two, now[:1], [before[1], now[2]]) == ["south"]


def test_a_run_of_sites_that_check_each_other_ends_as_the_plain_one(tmp_path: Path) -> None:
    plain = Federation(run_of(3, "method.name=ds-fl", "method.distill_epochs=1"), tmp_path / "plain")
    secure = Federation(signed(tmp_path), tmp_path / "secure")
    plain.run()
    with streams(secure) as link:
        assert secure.run(link)["status"] == "finished"
    assert not secure.events("left_out")
    for name, value in plain.central.weights().items():
        assert np.allclose(value, secure.central.weights()[name], atol=2e-6), name


@pytest.mark.parametrize("lie", ["signs nothing", "takes nobody", "takes not north"])
def test_one_site_that_quarrels_is_left_out_alone(tmp_path: Path, lie: str) -> None:
    made = Federation(signed(tmp_path, sites=4), tmp_path / "run")

    def lies(ask: Ask, reply: Reply) -> Reply:
        if ask.verb == "query.keys" and lie == "signs nothing":
            return Reply(reply.node, reply.arrays, {**reply.metrics, "signature": ""})
        if ask.verb == "query.shares" and lie.startswith("takes"):
            strangers = ["north"] if lie == "takes not north" else ["north", "site0", "site1", "nobody", "south"]
            return Reply(reply.node, reply.arrays, {**reply.metrics, "strangers": strangers})
        return reply

    spoil(made.nodes[1], lies)
    assert made.run()["status"] == "finished"
    assert {(event["site"], event["verb"]) for event in made.events("left_out")} == {("south", "query.shares")}
