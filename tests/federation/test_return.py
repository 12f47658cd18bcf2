"""A site that was late or lost is let in again at the next round, and what it says too late is never counted."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from fedstill.client.own_task import make_node
from fedstill.client.session import Door, Session, SessionLost, SessionRefused
from fedstill.common import checkpoint
from fedstill.common.config import RunConfig
from fedstill.common.wire import Ask, Failure, Reply
from fedstill.server.exchange import Exchange
from fedstill.server.link import LocalLink

from .conftest import ExchangeLink, Federation, spoil

Make = Callable[..., Federation]
Small = Callable[..., RunConfig]
QUICK = ("report.alone=false", "report.centralized=false", "exchange.quorum=0.5", "method.name=ds-fl")
PLACES = dict[str, list[tuple[str, int, int]]]


class Streams:
    """Sessions that can end and begin one by one, as processes do."""

    def __init__(self, made: Federation, patience: float) -> None:
        self.made, self.patience = made, patience
        self.exchange = Exchange("127.0.0.1:0", made.admit(), patience=patience, notice=self._notice)
        self.threads = [self.begin(number) for number in range(len(made.nodes))]
        assert self.exchange.wait_for(len(made.nodes), 30)
        self.link = ExchangeLink(self.exchange, [node.name for node in made.nodes])

    def _notice(self, kind: str, facts: dict[str, object]) -> None:
        self.made.record.event(kind, **facts)

    def begin(self, number: int) -> threading.Thread:
        node = self.made.nodes[number]
        door = Door(f"127.0.0.1:{self.exchange.port}", self.exchange.issue_token(number), patience=20)
        thread = threading.Thread(target=_serve, args=(Session(door, node.greeting(), node.answer),), daemon=True)
        thread.start()
        return thread


class Clock:
    """The exchange's clock, which can be put forward: whoever is awaited then is late, however slow the machine is."""

    ahead = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead


class Impatient(ExchangeLink):
    """Time is up for a step as soon as the second site has answered it."""

    clock = Clock()

    def deliver(self, parts: dict[str, Ask], deadline: float) -> Iterator[Reply | Failure]:
        for outcome in super().deliver(parts, deadline):
            yield outcome
            ask = parts[outcome.node]
            if (outcome.node, ask.verb, ask.settings["round"]) == ("south", "train.local", 1):
                self.clock.ahead += deadline + 1


class Killed(BaseException):
    """Ends a session as the end of its process would."""


def _serve(session: Session) -> None:
    with contextlib.suppress(Killed, SessionLost, SessionRefused):
        session.serve()


class LateLink(LocalLink):
    """The yardstick: the site works the Ask, and its answer comes too late."""

    def deliver(self, parts: dict[str, Ask], deadline: float) -> Iterator[Reply | Failure]:
        for outcome in super().deliver(parts, deadline):
            ask = parts[outcome.node]
            if outcome.node == "north" and ask.verb == "train.local" and ask.settings["round"] == 1:
                yield Failure("north", "late", gone=True)
            else:
                yield outcome


def noted(made: Federation) -> PLACES:
    """Which Asks each site works."""
    worked: PLACES = {node.name: [] for node in made.nodes}
    for node in made.nodes:

        def note(ask: Ask, reply: Reply, name: str = node.name) -> Reply:
            worked[name].append((ask.verb, ask.settings["round"], ask.settings["step"]))
            return reply

        spoil(node, note)
    return worked


def test_a_slow_site_is_left_behind_and_let_in_at_the_next_round(
    federation: Make, small: Small, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, plain = (federation(small(*QUICK, "exchange.train_deadline=900")) for _ in range(2))
    worked = noted(made)
    go_on = threading.Event()

    def slow(ask: Ask, reply: Reply) -> Reply:
        if (ask.verb, ask.settings["round"]) == ("train.local", 1):
            assert go_on.wait(300)
        return reply

    def predicted(ask: Ask, reply: Reply) -> Reply:
        if ask.verb == "query.predictions":
            go_on.set()  # the step that the other one missed is over
        return reply

    spoil(made.nodes[0], slow)
    spoil(made.nodes[1], predicted)
    streams = Streams(made, patience=20)
    link = Impatient(streams.exchange, ["north", "south"])
    monkeypatch.setattr("fedstill.server.exchange.time", link.clock)
    assert made.run(link)["status"] == "finished"
    link.close({})
    left = made.events("left_out")
    assert [(event["site"], event["round"], event["verb"]) for event in left] == [("north", 1, "train.local")]
    assert "no answer within 900 s" in left[0]["reason"]
    [back] = made.events("readmitted")
    assert (back["site"], back["missed"]) == ("north", left[0]["reason"])
    assert ("query.predictions", 2) in [place[:2] for place in worked["north"]]
    assert "query.predictions" not in [verb for verb, number, _ in worked["north"] if number == 1]
    assert all(len(places) == len(set(places)) for places in worked.values())
    plain.run(LateLink(plain.nodes))
    assert made.weights() == plain.weights()


def test_a_site_that_was_lost_comes_back_with_its_own_checkpoint(federation: Make, small: Small) -> None:
    made = federation(small(*QUICK, "rounds=3"))
    began: list[threading.Thread] = []

    def killed(ask: Ask, reply: Reply) -> Reply:
        if (ask.verb, ask.settings["round"]) == ("query.predictions", 2):
            raise Killed
        return reply

    def returns(ask: Ask, reply: Reply) -> Reply:
        if (ask.verb, ask.settings["round"]) == ("train.distil", 2):
            made.nodes[0] = make_node(made.config, made.config.sites[0], "run", made.folder / "sites" / "north")
            noted_again.update(noted(made))
            spoil(made.nodes[0], check)
            began.append(streams.begin(0))
            assert wait_until(lambda: streams.exchange.by_name["north"].anew)
        return reply

    def check(ask: Ask, reply: Reply) -> Reply:
        if ask.verb == "query.restore":
            arrays = checkpoint.flat(checkpoint.load(made.nodes[0].checkpoints, 1)[0])
            state = checkpoint.flat(made.nodes[0].state())
            same.append(all(np.array_equal(arrays[name], state[name]) for name in arrays))
        return reply

    noted_again: PLACES = {}
    same: list[bool] = []
    spoil(made.nodes[0], killed)
    spoil(made.nodes[1], returns)
    streams = Streams(made, patience=0.5)
    assert made.run(streams.link)["status"] == "finished"
    streams.link.close({})
    left = {(event["site"], event["round"], event["verb"]) for event in made.events("left_out")}
    assert ("north", 2, "query.predictions") in left
    assert {(site, number) for site, number, _ in left} == {("north", 2)}
    [back] = made.events("readmitted")
    assert (back["site"], back["round"]) == ("north", 3)
    verbs = [verb for verb, _, _ in noted_again["north"]]
    assert verbs[:3] == ["query.restore", "train.local", "query.predictions"]
    assert same == [True]
    assert len(verbs) == len(set(noted_again["north"]))
    assert made.federation.link.sites["north"]["rounds"] == [0, 1]
    for thread in (*streams.threads, *began):
        thread.join(20)


def wait_until(condition: Callable[[], bool], seconds: float = 30) -> bool:
    done = threading.Event()
    for _ in range(int(seconds * 20)):
        if condition():
            return True
        done.wait(0.05)
    return False


def test_a_site_that_began_anew_is_not_asked_before_it_is_let_in(federation: Make) -> None:
    exchange = Exchange("127.0.0.1:0", lambda facts: None, patience=0.2)

    def begin() -> Session:
        door = Door(f"127.0.0.1:{exchange.port}", exchange.issue_token(1))
        session = Session(door, {"name": "site"}, lambda ask: Reply("site", {}, {"who": id(door)}))
        threading.Thread(target=_serve, args=(session,), daemon=True).start()
        return session

    begin()
    assert exchange.wait_for(1, 20)
    [first] = exchange.deliver({"site": Ask("x")}, 20)
    old = exchange.by_name["site"]
    begin()  # the same node again, before the loss of its old stream was noticed
    assert wait_until(lambda: exchange.by_name["site"] is not old)
    [failure] = exchange.deliver({"site": Ask("x")}, 20)
    assert isinstance(failure, Failure)
    assert failure.gone
    assert "let in again at the next round" in failure.reason
    assert exchange.returned() == {"site": {"name": "site"}}
    assert exchange.returned() == {}
    [second] = exchange.deliver({"site": Ask("x")}, 20)
    assert isinstance(first, Reply)
    assert isinstance(second, Reply)
    assert first.metrics["who"] != second.metrics["who"]
    assert exchange.traffic()["site"][0] > old.bytes_up
    exchange.close({})


@pytest.mark.parametrize("method", ["fedavg", "feddf"])
def test_a_site_that_began_anew_is_sent_the_model_again(federation: Make, small: Small, method: str) -> None:
    same = ("sites.south.model=tiny-bert", "report.alone=false", "report.centralized=false", "method.local_epochs=1")
    made = federation(small(*same, f"method.name={method}"))
    made.run()
    assert "north" in made.method.copies.holders()
    made.method.site_began_anew("north")
    assert made.method.copies.holders() == {"south"}
