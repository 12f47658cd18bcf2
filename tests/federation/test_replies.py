"""One site sends what it likes in whole runs of every method; the honest sites finish every one of them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from fedstill.client.release.approval import verbs_of
from fedstill.common.config import ConfigError, RunConfig
from fedstill.common.config.files import load_run
from fedstill.common.readable import plain
from fedstill.common.wire import Ask, Facts, Failure, Reply, WireError, decode
from fedstill.common.wire.frames import REPLY, Frame, cut
from fedstill.server.link import LocalLink
from fedstill.strategies import METHODS, VERBS
from tests.conftest import SMALL

from .conftest import Federation
from .mixed import mixed_run

Make = Callable[..., Federation]
Small = Callable[..., RunConfig]
CASES = int(os.environ.get("FEDSTILL_FUZZ", "400"))  # of each method, so 10,000 in all; `make fuzz` tries more
FUZZ: Any = {"deadline": None, "suppress_health_check": list(HealthCheck), "database": None,
             "phases": [Phase.generate], "print_blob": False,
             "derandomize": "FEDSTILL_FUZZ" not in os.environ}  # fmt: skip
QUICK = ("rounds=1", "report.alone=false", "report.centralized=false", "report.evaluate=end", "exchange.quorum=0.5",
         "data.public=16", "data.private=32", "data.test=8")  # fmt: skip
ONCE = ("method.distill_epochs=1",)
ALIKE = ("sites.south.model=tiny-bert",)
RUNS: dict[str, tuple[str, ...]] = {
    "fedid": ONCE,
    "ds-fl": ONCE,
    "mhat": ONCE,
    "logit-fedavg": ONCE,
    "fedmd": ONCE,
    "cronus": ONCE,
    "fedkd": ONCE,
    "adafd": ONCE,
    "evenhand": (*ONCE, "data.blind=true"),
    "sinkhorn": (*ONCE, "method.noise_texts=8"),
    "entropy": (*ONCE, "method.noise_texts=8"),
    "feded": (*ONCE, *ALIKE),
    "feddf": ONCE,
    "fedaux": (*ONCE, *ALIKE, "method.extractor=tiny-bert", "method.epsilon=1.0"),
    "feddrs": (*ALIKE, "method.pseudo_texts=2", "method.sample_steps=1", "method.iterations=1",
               "method.post_iterations=1", "rounds=2", "method.participation=0.5"),
    "fedkd-mutual": ALIKE,
    "fedavg": ALIKE,
    "fedprox": ALIKE,
    "fedbn": ALIKE,
    "ditto": ALIKE,
    "spfl": ALIKE,
    "percfl": ALIKE,
    "fedadam": ALIKE,
    "fedmedian": ALIKE,
    "fedtrimmedavg": ALIKE,
    "krum": (*ALIKE, "method.num_malicious_nodes=0"),
}  # fmt: skip

# krum needs three that answer; FedDRS asks those that did not take part in its last round
EXTRA = {"krum": ("east", "west"), "feddrs": ("east", "west")}


class Loose:
    """A site whose answers go through `spoil` before they leave; the rest of it is honest."""

    def __init__(self, node: Any, spoil: Callable[[Ask, Reply], Reply]) -> None:
        self.node, self.name, self.spoil = node, node.name, spoil

    def greeting(self) -> Facts:
        facts: Facts = self.node.greeting()
        return facts

    def answer(self, ask: Ask) -> Reply:
        return self.spoil(ask, self.node.answer(ask))


class Wire(LocalLink):
    """Plain calls whose Replies are still encoded and decoded, as on a stream: what cannot travel is no attack."""

    def deliver(self, parts: dict[str, Ask], deadline: float) -> Any:
        for name, ask in parts.items():
            try:
                reply = self.nodes[name].answer(ask)
                head, buffers = Frame(REPLY, 1, reply.arrays, {"metrics": reply.metrics}).packed
                arrays, facts = decode(head, memoryview(b"".join(buffers)))
                yield Reply(name, arrays, facts["metrics"])
            except (WireError, TypeError, ValueError, OverflowError, RecursionError) as error:
                yield Failure(name, str(error))


def attacked(made: Federation, spoil: Callable[[Ask, Reply], Reply]) -> Facts:
    """Run with the last site loose; return the summary."""
    nodes = [*made.nodes[:-1], Loose(made.nodes[-1], spoil)]
    return made.run(Wire(nodes))  # type: ignore[arg-type]


# --- the review's attacks, each at quorum 0.5 ---


def deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


def lacking(metrics: Facts, name: str) -> Facts:
    return {key: value for key, value in metrics.items() if key != name}


ATTACKS: dict[str, tuple[str, str, Callable[[Facts], Facts]]] = {
    "a second of 10^400": ("ds-fl", "train.local", lambda m: {**m, "seconds": 10**400}),
    "a loss of 10^400": ("ds-fl", "train.local", lambda m: {**m, "loss": 10**400}),
    "metrics 600 deep": ("ds-fl", "train.local", lambda m: {**m, "losses": deep(600)}),
    "no texts": ("ds-fl", "query.predictions", lambda m: lacking(m, "texts")),
    "no texts from a distilled site": (
        "cronus",
        "train.distil",
        lambda m: lacking(m, "texts"),
    ),
    "no shapes": ("fedavg", "query.shapes", lambda m: lacking(m, "shapes")),
    "shapes of words": ("fedavg", "query.shapes", lambda m: {**m, "shapes": {"a": "b"}}),
    "other shapes": ("fedavg", "query.shapes", lambda m: {**m, "shapes": {"a": [2]}}),
    "a word for a score": ("ds-fl", "evaluate.test", lambda m: {**m, "accuracy": "[/red]best"}),
    "a table for a score": ("ds-fl", "evaluate.test", lambda m: {**m, "accuracy": {"a": 1}}),
    "a thousand times more texts": ("ds-fl", "query.predictions", lambda m: {**m, "texts": 10**12}),
    "a score with a styled name": ("ds-fl", "evaluate.test", lambda m: {**m, "\x1b[31mred": 1.0}),
    "7 MB of metrics": ("ds-fl", "evaluate.test", lambda m: {**m, **{f"score {n}": 0.5 for n in range(400_000)}}),
    "no metrics": ("ds-fl", "query.save", lambda m: [1]),  # type: ignore[arg-type, return-value]
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_one_site_ends_no_run(federation: Make, small: Small, attack: str) -> None:
    method, verb, change = ATTACKS[attack]
    made = federation(small(f"method.name={method}", *QUICK, *RUNS[method]))

    def spoil(ask: Ask, reply: Reply) -> Reply:
        return Reply(reply.node, reply.arrays, change(reply.metrics)) if ask.verb == verb else reply

    summary = attacked(made, spoil)
    assert summary["status"] == "finished"
    harmless = attack.endswith("a distilled site")  # n_k is the greeting's
    assert {event["site"] for event in made.events("left_out")} == (set() if harmless else {"south"})
    assert summary["sites"]["north"]["after"]["accuracy"] >= 0
    again = federation(made.config, made.folder.name)  # what it sent is in no checkpoint
    assert again.run(resume=True)["status"] == "finished"


@pytest.mark.parametrize(
    "change",
    [
        {"texts": 10**12},
        {"texts": 1_000_001},
        {"texts": True},
        {"family": "<script>alert(1)</script>"},
        {"family": "[red]bert[/red]"},
        {"model": "bert\x1b[2J"},
        {"model": "| bert |"},
        {"labels": ["\x1b[31m", "b"]},
        {"rates": deep(600)},
        {"rates": {"local": 10**400}},
        {"rounds": [10**400]},
        {"parameters": -1},
        {"motto": "hello"},
        {"family": None},
    ],
)
def test_a_greeting_that_cannot_be_used_is_refused_with_words_that_can(
    federation: Make, small: Small, change: Facts
) -> None:
    made = federation(small(*QUICK))
    greeting, admit = made.nodes[0].greeting(), made.admit()
    assert admit(greeting) is None
    reason = admit({**greeting, **change})
    assert reason is not None
    assert plain(reason) == reason.replace("[", "(").replace("]", ")") or plain(reason) == reason
    assert "\x1b" not in reason


def test_the_cap_on_texts_is_a_setting(federation: Make, small: Small) -> None:
    made = federation(small(*QUICK, "exchange.most_texts=10"))
    assert "exchange.most_texts is 10" in str(made.admit()(made.nodes[0].greeting()))
    made = federation(small(*QUICK, "exchange.texts={north = 10, south = 100}"))
    assert "exchange.texts.north is 10" in str(made.admit()(made.nodes[0].greeting()))
    assert made.admit()(made.nodes[1].greeting()) is None
    with pytest.raises(ConfigError, match=r"exchange\.texts names 'nroth', which is no site of this run"):
        small("exchange.texts={nroth = 10}")


def test_words_from_outside_style_no_screen_and_mark_up_no_page() -> None:
    assert plain("a\x1b[31mb\n[bold]c[/bold] <b>d</b> \u202ee [1, 2]") == (
        "a (31mb (bold)c(/bold) \u2039b\u203ad\u2039/b\u203a  e [1, 2]".replace("(31mb", "[31mb")
    )
    assert len(plain("x" * 10**6)) == 2000


def test_an_errors_text_is_harmless_in_the_record(federation: Make, small: Small) -> None:
    made = federation(small("method.name=ds-fl", *ONCE, *QUICK))

    def spoil(ask: Ask, reply: Reply) -> Reply:
        if ask.verb == "query.predictions":
            raise WireError("\x1b[2J[/red]<img src=x onerror=alert(1)>" + "x" * 9000)
        return reply

    attacked(made, spoil)
    [event] = made.events("left_out")
    assert event["reason"].startswith(" [2J(/red)\u2039img src=x")
    assert len(event["reason"]) == 2000


def test_a_head_of_eight_megabytes_is_refused_unread() -> None:
    from fedstill.common.wire.frames import join

    frame = Frame(REPLY, 1, facts={"metrics": {"losses": [0.5] * 2_000_000}})
    with pytest.raises(WireError, match="more than the 1,048,576"):
        list(join(cut(frame), 1 << 20, lambda size: None))


def test_an_answer_has_room_for_what_was_asked_and_no_more() -> None:
    rows = Ask("query.predictions", {"rows": np.arange(1000)})
    wanted = VERBS["query.predictions"].room(rows, 2)
    assert wanted is not None
    assert 1000 * 2 * 4 < wanted < 300_000
    assert VERBS["evaluate.test"].room(Ask("evaluate.test"), 2) == 0
    assert VERBS["train.parameters"].room(Ask("train.parameters"), 2) is None


# --- fuzz ---

ODD: list[Any] = [
    10**400, -(10**400), float("nan"), float("inf"), -1, 0, 1e308, True, None, "", "word", "\x1b[31m", "<b>",
    "x" * 2000, [], [1], [None], ["a"], {}, {"a": 1}, {"a": {"b": 1}}, deep(600), [float("nan")], [[1]], 2**63, 1.5,
    "\ud800",
]  # fmt: skip


@st.composite
def spoiled(draw: Any, reply: Reply) -> Reply:
    """A Reply with one to three changes to its metrics and arrays."""
    arrays, metrics = dict(reply.arrays), dict(reply.metrics)
    for _ in range(draw(st.integers(1, 3))):
        part = draw(st.sampled_from(["value", "drop", "add", "array", "lose", "more"]))
        if part == "value" and metrics:
            metrics[draw(st.sampled_from(sorted(metrics)))] = draw(st.sampled_from(ODD))
        elif part == "drop" and metrics:
            metrics.pop(draw(st.sampled_from(sorted(metrics))))
        elif part == "add":
            names = ["loss", "texts", "privacy", "seconds", "accuracy", "losses", "\x1b", "shapes", "x" * 300]
            metrics[draw(st.sampled_from(names))] = draw(st.sampled_from(ODD))
        elif part == "array" and arrays:
            name = draw(st.sampled_from(sorted(arrays)))
            arrays[name] = draw(odd_array(np.array(arrays[name])))
        elif part == "lose" and arrays:
            arrays.pop(draw(st.sampled_from(sorted(arrays))))
        elif part == "more":
            names = ["logits", "items", "counts", "logits.bounds", "w", "../x", "", "x" * 300]
            arrays[draw(st.sampled_from(names))] = draw(odd_array(np.ones((2, 2), np.float32)))
    return Reply(reply.node, arrays, metrics)


@st.composite
def odd_array(draw: Any, value: np.ndarray) -> np.ndarray:
    """An array that is not as it was."""
    kind = draw(st.sampled_from(["fill", "empty", "flat", "axis", "type", "scalar", "short", "zero side"]))
    if kind == "fill":
        number = draw(st.sampled_from([np.nan, np.inf, 1e38, 1e30, 1e8, -1e8, 0.0, -1.0]))
        return np.full(value.shape, number, np.float32)
    if kind == "type":
        return np.zeros(value.shape, draw(st.sampled_from(["int64", "uint8", "float64", "float16", "bool", "int8"])))
    shapes: dict[str, tuple[int, ...]] = {
        "empty": (0,), "flat": (value.size,), "axis": (1, *value.shape), "scalar": (), "zero side": (*value.shape, 0),
        "short": (max(0, value.shape[0] - 1), *value.shape[1:]) if value.ndim else (1,),
    }  # fmt: skip
    return np.zeros(shapes[kind], value.dtype)


def run_of(method: str, folder: Path) -> RunConfig:
    """The run in which a method is fuzzed."""
    if method == "atc":
        return mixed_run(folder, "exchange.quorum=0.5", "rounds=2", "method.assign_rounds=1")
    more = "".join(f'[[sites]]\nname = "{name}"\nmodel = "tiny-bert"\n' for name in EXTRA.get(method, ()))
    return load_run(SMALL.replace("[exchange]", more + "[exchange]"), (f"method.name={method}", *QUICK, *RUNS[method]))


def heard_in(made: Federation) -> dict[str, tuple[Ask, Reply]]:
    """One Ask of every verb of a run, and its honest answer."""
    found: dict[str, tuple[Ask, Reply]] = {}
    ask_all = made.federation.ask

    def listening(ask: Ask) -> list[Reply]:
        replies = ask_all(ask)
        for reply in replies[-1:]:
            found[ask.verb] = (ask, reply)
        return replies

    made.federation.ask = listening  # type: ignore[method-assign]
    made.run(Wire(made.nodes))
    made.federation.ask = ask_all  # type: ignore[method-assign]
    return found


@pytest.mark.parametrize("method", [*RUNS, "atc"])
def test_whatever_one_site_sends_the_others_finish(method: str, tmp_path: Path) -> None:
    config = run_of(method, tmp_path / "files")
    made = Federation(config, tmp_path / "honest")
    heard = heard_in(made)
    assert len(heard) >= 3
    assert set(heard) <= set(verbs_of(config))  # what an approved run may ask
    assert method != "feddrs" or "query.trained" in heard
    check = made.federation._checked
    honest = {node.name for node in made.nodes[:-1]}

    @settings(max_examples=CASES, **FUZZ)
    @given(st.data())
    def every_reply_is_used_or_refused(data: st.DataObject) -> None:
        ask, reply = heard[data.draw(st.sampled_from(sorted(heard)))]
        sent = data.draw(spoiled(reply))
        try:
            used = check(VERBS[ask.verb], ask, sent)
        except Exception:
            return
        json.dumps(used.metrics, allow_nan=False)
        assert all(np.isfinite(value).all() for value in used.arrays.values())

    every_reply_is_used_or_refused()

    @settings(max_examples=max(2, CASES // 150), **FUZZ)
    @given(st.data())
    def every_run_ends(data: st.DataObject) -> None:
        def spoil(ask: Ask, reply: Reply) -> Reply:
            return data.draw(spoiled(reply)) if data.draw(st.booleans()) else reply

        # A federation of its own: weights and memory of an earlier example would decide what this one asks, and then
        # the same draws would not make the same run.
        with TemporaryDirectory(dir=tmp_path) as folder:
            summary = attacked(Federation(config, Path(folder)), spoil)
        assert summary["status"] == "finished"
        json.dumps(summary)
        assert honest <= {name for name, site in summary["sites"].items() if site["after"]}

    every_run_ends()


@pytest.mark.parametrize("method", ["feddrs", "fedid", "krum"])
def test_the_same_answers_make_the_same_run(method: str, tmp_path: Path) -> None:
    """What a run asks follows from its seed and the answers alone; the fuzz could not repeat a run otherwise."""
    config = run_of(method, tmp_path)
    runs: list[tuple[list[tuple[str, Any]], list[tuple[Any, ...]], str]] = []
    for folder in (tmp_path / "one", tmp_path / "two"):
        made, asked, lies = Federation(config, folder), list[tuple[str, Any]](), cycle([np.nan, 90.0, 1e8, 0.0])

        def spoil(ask: Ask, reply: Reply, asked: Any = asked, lies: Any = lies) -> Reply:
            asked.append((ask.verb, ask.settings.get("step")))
            if not reply.arrays:
                return reply
            name = max(reply.arrays)
            value = np.full(reply.arrays[name].shape, next(lies), np.float32)
            return Reply(reply.node, {**reply.arrays, name: value}, reply.metrics)

        assert attacked(made, spoil)["status"] == "finished"
        left = [(event["site"], event["verb"], event["reason"]) for event in made.events("left_out")]
        runs.append((asked, left, made.weights()))
    assert runs[0] == runs[1]
    assert runs[0][1]  # some of it was refused


def test_the_fuzz_knows_every_verb() -> None:
    """A method added later must be added to RUNS, unless its verbs are another one's."""
    missing = {"isolated", "centralized", "atc", "fedavg-st", "multikrum", "bulyan"}  # verbs of fedavg and others
    built_in = {name for name, kind in METHODS.items() if kind.__module__.startswith("fedstill.")}
    assert built_in - set(RUNS) - missing == set()
