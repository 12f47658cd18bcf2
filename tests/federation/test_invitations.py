"""Who is invited to a run, how often, and under which name: real streams, and nodes as a SuperLink lists them."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from flwr.app import Message
from flwr.common.constant import ErrorCode
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from fedstill.client.session import Door, Session, SessionLost, SessionRefused
from fedstill.common.config import RunConfig
from fedstill.common.wire import Ask, Facts, Failure, Reply, from_records
from fedstill.server.link import JoinError, StreamLink

Small = Callable[..., RunConfig]


class Ended(BaseException):
    """Ends a session as kill -9 ends its process."""


class Nodes(Grid):
    """SuperNodes that open a session for every join; node 1 is registered as north, node 2 as south."""

    def __init__(self, calls_itself: dict[int, str]) -> None:
        self.calls_itself = calls_itself
        self.info = {1: NodeInfo(node_id=1, name="north"), 2: NodeInfo(node_id=2, name="south")}
        for node in self.info.values():
            node.last_activated_at = "in the morning"
        self.joins: list[int] = []
        self.failed: list[tuple[str, int, str, int]] = []
        self.unreached = 0  # how many joins Flower answers itself: no heartbeat from that node
        self.up: dict[int, int] = dict.fromkeys(self.info, 0)  # which start of the node runs

    def set_run(self, run: Any) -> None: ...

    @property
    def run(self) -> Any:
        return None

    def create_message(self, *_: Any, **__: Any) -> Message:
        raise NotImplementedError

    def send_and_receive(self, *_: Any, **__: Any) -> Iterable[Message]:
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        return list(self.info)

    def get_nodes(self) -> Iterable[NodeInfo]:
        return list(self.info.values())

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        names = []
        for message in messages:
            node, name = message.metadata.dst_node_id, f"join-{len(self.joins)}"
            self.joins.append(node)
            names.append(name)
            facts = from_records(message.content)[1]
            if self.unreached:
                self.unreached -= 1
                self.failed.append((name, node, "Error: Node Unavailable", ErrorCode.NODE_UNAVAILABLE))
                continue
            threading.Thread(target=self._serve, args=(name, node, facts, self.up[node]), daemon=True).start()
        return names

    def pull_messages(self, names: Iterable[str]) -> Iterable[Any]:
        found, self.failed = [f for f in self.failed if f[0] in set(names)], []
        return [_error(*failed) for failed in found]

    def _serve(self, name: str, node: int, facts: Facts, start: int) -> None:
        def answer(ask: Ask) -> Reply:
            if self.up[node] != start:
                raise Ended
            return Reply(self.calls_itself[node], {}, {"start": start})

        door = Door(str(facts["address"]), str(facts["token"]), patience=1)
        session = Session(door, {"name": self.calls_itself[node], "family": "bert"}, answer)
        try:
            with contextlib.suppress(Ended):
                session.serve()
        except (SessionLost, SessionRefused) as error:
            self.failed.append((name, node, str(error), ErrorCode.CLIENT_APP_RAISED_EXCEPTION))

    def killed_and_back(self, node: int) -> None:
        """The SuperNode is another process; Flower has seen it come and not go."""
        self.up[node] += 1
        self.info[node].last_activated_at = f"start {self.up[node]}"


def _error(name: str, node: int, reason: str, code: int) -> Any:
    """As much of Flower's error reply as a link reads."""
    about = SimpleNamespace(reply_to_message_id=name, src_node_id=node)
    return SimpleNamespace(metadata=about, has_error=lambda: True, error=SimpleNamespace(reason=reason, code=code))


@pytest.fixture
def opened(small: Small, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., StreamLink]]:
    links: list[StreamLink] = []
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)  # as in a ServerApp's process

    def make(nodes: Nodes, *changes: str) -> StreamLink:
        notices: list[tuple[str, Facts]] = []
        config = small("exchange.reconnect=1", *changes)
        links.append(StreamLink(nodes, config, "run", lambda facts: None, lambda *said: notices.append(said)))
        links[-1].noted = notices  # type: ignore[attr-defined]
        return links[-1]

    yield make
    for link in links:
        link.close({})


def wait_until(condition: Callable[[], Any], seconds: float = 30) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.05)
    return False


def test_a_site_that_was_killed_and_is_back_at_once_is_invited_again_and_only_then(
    opened: Callable[..., StreamLink],
) -> None:
    nodes = Nodes({1: "north", 2: "south"})
    link = opened(nodes)
    everybody = {"north": Ask("x"), "south": Ask("x")}
    assert all(isinstance(reply, Reply) for reply in link.deliver(everybody, 30))
    assert link.returned() == {}
    nodes.info[2].last_activated_at = "after a cut of its network"  # and its session lives: nobody is asked again
    assert link.returned() == {}
    assert nodes.joins == [1, 2]
    nodes.killed_and_back(1)
    lost = {outcome.node: outcome for outcome in link.deliver(everybody, 30)}
    assert isinstance(lost["north"], Failure)
    assert isinstance(lost["south"], Reply)
    assert link.returned() == {}
    assert nodes.joins == [1, 2, 1]
    assert wait_until(lambda: link.exchange.by_name["north"].anew)
    assert list(link.returned()) == ["north"]
    assert nodes.joins == [1, 2, 1]
    answers = {reply.node: reply for reply in link.deliver(everybody, 30)}
    assert answers["north"].metrics == {"start": 1}  # type: ignore[union-attr]


def test_a_site_that_flower_does_not_reach_yet_is_invited_until_it_joins(opened: Callable[..., StreamLink]) -> None:
    """As after a restart of the SuperLink: nodes are listed whose heartbeats are too old."""
    nodes = Nodes({1: "north", 2: "south"})
    nodes.unreached = 3
    assert opened(nodes).node_of == {"north": 1, "south": 2}
    assert sorted(nodes.joins) == [1, 1, 1, 2, 2] or sorted(nodes.joins) == [1, 1, 2, 2, 2]


def test_a_key_is_bound_to_the_name_that_it_was_registered_under(opened: Callable[..., StreamLink]) -> None:
    with pytest.raises(JoinError) as refused:
        opened(Nodes({1: "north", 2: "north"}), "exchange.join_deadline=8")
    assert "1 of 2 sites joined" in str(refused.value)
    assert "its key is registered as 'south' and it calls itself 'north'" in str(refused.value)
    assert "fedstill keys register" in str(refused.value)


def test_a_key_without_a_name_cannot_take_a_registered_one(opened: Callable[..., StreamLink]) -> None:
    nodes = Nodes({1: "north", 2: "south", 3: "south"})
    nodes.info[3] = NodeInfo(node_id=3)
    nodes.up[3] = 0
    link = opened(nodes)
    assert wait_until(lambda: any(kind == "refused" for kind, _ in link.noted))  # type: ignore[attr-defined]
    [said] = [facts["reason"] for kind, facts in link.noted if kind == "refused"]  # type: ignore[attr-defined]
    assert "the name 'south' belongs to another key" in said
    assert link.node_of == {"north": 1, "south": 2}


def test_a_node_that_nobody_named_may_be_any_site_of_the_run(opened: Callable[..., StreamLink]) -> None:
    """A SuperLink without keys: Flower names nobody, and the run's own list of sites decides."""
    nodes = Nodes({1: "south", 2: "north"})
    for node in nodes.info.values():
        node.ClearField("name")
    assert opened(nodes).node_of == {"north": 2, "south": 1}
