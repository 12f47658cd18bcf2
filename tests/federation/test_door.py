"""The door: who has no token takes no thread, who does not read loses its stream, and a name needs its certificate."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest
from flwr.supercore.task_identity import TaskIdentity

from fedstill.client.app import own_pair
from fedstill.client.session import Door, Session, SessionLost, SessionRefused
from fedstill.common.config import RunConfig, SiteFile
from fedstill.common.wire import Ask, Facts, Failure, Reply, to_records
from fedstill.common.wire.frames import HELLO, METHOD, READY, TOKEN, WELCOME, Frame, cut, grpc_options, join
from fedstill.deploy.coordinator import keys
from fedstill.deploy.coordinator.certificates import CertificateError, make_authority, make_server, make_site
from fedstill.server.exchange import PER_CONNECTION, STREAMS, Exchange, ExchangeError
from fedstill.server.link import JoinError, MessageLink

Small = Callable[..., RunConfig]


def echo(ask: Ask) -> Reply:
    return Reply("echo", ask.arrays, ask.settings)


def begin(exchange: Exchange, name: str = "echo", **door: Any) -> tuple[Session, threading.Thread, list[BaseException]]:
    session = Session(Door(f"127.0.0.1:{exchange.port}", exchange.issue_token(1), **door), {"name": name}, echo)
    errors: list[BaseException] = []

    def serve() -> None:
        try:
            session.serve()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    return session, thread, errors


def threads() -> int:
    return sum(thread.name.startswith("exchange_") for thread in threading.enumerate())


def test_silent_strangers_keep_nobody_out_and_leave_their_lines() -> None:
    notices: list[Facts] = []
    exchange = Exchange("127.0.0.1:0", lambda facts: None, most_sites=1, notice=lambda _, facts: notices.append(facts))
    silent: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    before = threads()
    with grpc.insecure_channel(f"127.0.0.1:{exchange.port}", grpc_options(20)) as channel:
        calls = [channel.stream_stream(METHOD)(iter(silent.get, None)) for _ in range(150)]
        calls += [
            channel.stream_stream(METHOD)(iter(silent.get, None), metadata=((TOKEN, "guess"),)) for _ in range(150)
        ]
        codes = [call.code() for call in calls]
        assert set(codes) <= {grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.UNAVAILABLE}  # more than a connection may
        assert threads() == before  # none of the sites' threads was taken
        _, thread, _ = begin(exchange)
        assert exchange.wait_for(1, 30)
        for _ in calls:
            silent.put(None)
    turned_away = codes.count(grpc.StatusCode.UNIMPLEMENTED)
    assert [facts["reason"] for facts in notices].count("unknown or spent token") == turned_away > 20
    exchange.close({})
    thread.join(10)


def test_one_token_holds_no_more_than_its_share_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedstill.server.exchange.GREETING", 60)
    exchange = Exchange("127.0.0.1:0", lambda facts: None, most_sites=2)
    token, silent = exchange.issue_token(7), queue.SimpleQueue[bytes | None]()
    channels = [grpc.insecure_channel(f"127.0.0.1:{exchange.port}", [("grpc.use_local_subchannel_pool", 1)])
                for _ in range(5)]  # fmt: skip
    calls = [
        channel.stream_stream(METHOD)(iter(silent.get, None), metadata=((TOKEN, token),))
        for channel in channels
        for _ in range(4)
    ]
    turned_away = 0
    end = time.monotonic() + 30
    while turned_away < 18 and time.monotonic() < end:
        turned_away = sum(call.done() for call in calls)
        time.sleep(0.05)
    assert turned_away == 18
    _, thread, _ = begin(exchange)
    assert exchange.wait_for(1, 30)
    for call in calls:
        call.cancel()
        silent.put(None)
    exchange.close({})
    thread.join(10)


def deaf(exchange: Exchange, token: str, channel: grpc.Channel) -> tuple[Any, str, Any]:
    """A site that takes its seat and reads nothing after the welcome; its call and its next token."""
    outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    for message in cut(Frame(HELLO, facts={"name": "deaf"})):
        outgoing.put(message)
    call = channel.stream_stream(METHOD)(iter(outgoing.get, None), metadata=((TOKEN, token),))
    welcome = next(join(iter([next(call)]), 1 << 20, lambda size: None))
    assert welcome.kind == WELCOME
    return call, welcome.facts["token"], outgoing


def test_a_site_that_does_not_read_loses_its_stream_and_its_thread() -> None:
    notices: list[Facts] = []
    exchange = Exchange("127.0.0.1:0", lambda facts: None, most_sites=2, patience=1.0, write_deadline=0.5,
                        notice=lambda _, facts: notices.append(facts))  # fmt: skip
    _, thread, _ = begin(exchange)
    with grpc.insecure_channel(f"127.0.0.1:{exchange.port}", grpc_options(20)) as channel:
        call, _, outgoing = deaf(exchange, exchange.issue_token(2), channel)
        assert exchange.wait_for(2, 30)
        state = {"w": np.zeros(64 << 20, np.uint8)}
        outcomes = {o.node or "echo": o for o in exchange.deliver(dict.fromkeys(("echo", "deaf"), Ask("x", state)), 30)}
        assert isinstance(outcomes["echo"], Reply)
        assert isinstance(outcomes["deaf"], Failure)
        assert "its connection broke" in outcomes["deaf"].reason
        assert any("has not read" in str(facts.get("reason")) for facts in notices)
        assert exchange.by_name["deaf"].streams == 0
        outgoing.put(None)
        call.cancel()
    exchange.close({})
    thread.join(10)


def test_a_call_that_is_replaced_is_cancelled() -> None:
    exchange = Exchange("127.0.0.1:0", lambda facts: None, most_sites=1, write_deadline=1000)
    channels = [grpc.insecure_channel(f"127.0.0.1:{exchange.port}", [("grpc.use_local_subchannel_pool", 1)])
                for _ in range(6)]  # fmt: skip
    token, calls = exchange.issue_token(1), []
    for channel in channels:  # each is full of what nobody reads when the next comes
        call, token, _ = deaf(exchange, token, channel)
        calls.append(call)
        waiting = exchange.deliver({"deaf": Ask("x", {"w": np.zeros(32 << 20, np.uint8)})}, 0.3)
        assert isinstance(next(waiting), Failure)
    end = time.monotonic() + 20
    while exchange.by_name["deaf"].streams > 1 and time.monotonic() < end:
        time.sleep(0.05)
    assert exchange.by_name["deaf"].streams == 1  # of six, the last
    for call in calls:
        call.cancel()
    exchange.close({})


def calls_with(exchange: Exchange, channel: grpc.Channel, count: int) -> list[tuple[Any, Any]]:
    """Silent calls, each with a token of its own; and what each would say."""
    found = []
    for number in range(count):
        says: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        metadata = ((TOKEN, exchange.issue_token(100 + number)),)
        found.append((channel.stream_stream(METHOD)(iter(says.get, None), metadata=metadata, timeout=40), says))
    return found


def held(exchange: Exchange) -> int:
    """Streams that hold a thread."""
    return sum({id(seat): seat.streams for seat in exchange._by_token.values()}.values())


def soon(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_one_connection_holds_no_more_than_its_share_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has many tokens, such as a coordinator's former friend, still has one connection's streams."""
    monkeypatch.setattr("fedstill.server.exchange.GREETING", 60)
    exchange = Exchange("127.0.0.1:0", lambda facts: None, most_sites=64)
    options = [*grpc_options(20), ("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(f"127.0.0.1:{exchange.port}", options) as channel:
        calls = calls_with(exchange, channel, PER_CONNECTION + 14)
        soon(lambda: held(exchange) >= PER_CONNECTION)
        _, thread, _ = begin(exchange)  # another connection has threads of its own
        assert exchange.wait_for(1, 30)
        assert held(exchange) == PER_CONNECTION + 1
        for call, says in calls:
            call.cancel()
            says.put(None)
    exchange.close({})
    thread.join(10)


def test_a_call_that_no_thread_is_left_for_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would wait unseen for a thread, and a site behind it with it."""
    monkeypatch.setattr("fedstill.server.exchange.GREETING", 60)
    exchange = Exchange("127.0.0.1:0", lambda facts: None, most_sites=1)
    with grpc.insecure_channel(f"127.0.0.1:{exchange.port}", grpc_options(20)) as channel:
        calls = calls_with(exchange, channel, 14)
        soon(lambda: sum(call.done() for call, _ in calls) >= 4)
        assert held(exchange) == STREAMS + 8
        assert {call.code() for call, _ in calls if call.done()} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        for call, says in calls:
            call.cancel()
            says.put(None)
    exchange.close({})


def test_a_guest_with_a_token_that_says_nothing_is_sent_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedstill.server.exchange.GREETING", 0.3)
    exchange = Exchange("127.0.0.1:0", lambda facts: None, most_sites=1)
    with grpc.insecure_channel(f"127.0.0.1:{exchange.port}", grpc_options(20)) as channel:
        [(call, says)] = calls_with(exchange, channel, 1)
        soon(lambda: call.done() or held(exchange) == 1)
        assert call.code() is grpc.StatusCode.CANCELLED  # by the server, long before its own deadline
        soon(lambda: held(exchange) == 0)
        says.put(None)
    exchange.close({})


def test_a_token_that_was_spent_between_the_door_and_the_seat_opens_nothing() -> None:
    exchange = Exchange("127.0.0.1:0", lambda facts: None, most_sites=1)
    token, early = exchange.issue_token(1), queue.SimpleQueue[bytes | None]()
    with grpc.insecure_channel(f"127.0.0.1:{exchange.port}", grpc_options(20)) as channel:
        call = channel.stream_stream(METHOD)(iter(early.get, None), metadata=((TOKEN, token),), timeout=20)
        soon(lambda: held(exchange) == 1)  # it is in, with a token that is good so far
        rightful, successor, says = deaf(exchange, token, channel)
        for message in cut(Frame(READY, facts={"token": successor})):
            says.put(message)
        soon(lambda: not exchange._may_enter(token))
        for message in cut(Frame(HELLO, facts={"name": "deaf"})):
            early.put(message)
        assert call.code() is grpc.StatusCode.UNAUTHENTICATED
        assert exchange.by_name["deaf"].outbox is not None  # and the rightful stream goes on
        rightful.cancel()
        early.put(None), says.put(None)
    exchange.close({})


# --- certificates of sites ---


@pytest.fixture(scope="module")
def office(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An authority, and certified keys of two sites; a stranger's is certified by another authority."""
    folder = tmp_path_factory.mktemp("office")
    make_authority(folder)
    make_server(folder, ["127.0.0.1", "localhost"])
    make_authority(folder / "other")
    for name in ("north", "south", "stranger"):
        keys.new_key(folder / f"{name}.key")
        make_site(folder / "other" if name == "stranger" else folder, name, folder / f"{name}.key.pub")
    return folder


def pair_of(office: Path, name: str) -> tuple[bytes, bytes] | None:
    folder = office / "other" if name == "stranger" else office
    files = {"private_key": office / f"{name}.key", "certificate": folder / f"sites/{name}.crt"}
    return own_pair(SiteFile(name=name, model="tiny-bert", root_certificates=office / "ca.crt", **files))


@pytest.fixture
def guarded(office: Path) -> Iterator[Exchange]:
    files = {"certificate": office / "server.crt", "key": office / "server.key", "authority": office / "ca.crt"}
    exchange = Exchange("127.0.0.1:0", lambda facts: None, **files)  # type: ignore[arg-type]
    yield exchange
    exchange.close({})


def test_a_site_with_its_certificate_is_let_in(office: Path, guarded: Exchange) -> None:
    _, thread, _ = begin(guarded, "north", root_certificates=office / "ca.crt", pair=pair_of(office, "north"))
    assert guarded.wait_for(1, 20)
    [reply] = guarded.deliver({"north": Ask("x", {"a": np.arange(3)})}, 20)
    assert isinstance(reply, Reply)
    guarded.close({})
    thread.join(10)


@pytest.mark.parametrize(("who", "error"), [(None, SessionLost), ("stranger", SessionLost), ("south", SessionRefused)])
def test_without_its_own_certificate_a_token_opens_nothing(
    office: Path, guarded: Exchange, who: str | None, error: type[Exception]
) -> None:
    pair = None if who is None else pair_of(office, who)
    _, thread, errors = begin(guarded, "north", root_certificates=office / "ca.crt", pair=pair, patience=0.5)
    thread.join(30)
    assert isinstance(errors[0], error)
    assert not guarded.by_name
    assert who != "south" or "its certificate is of south and it calls itself north" in str(errors[0])


def test_a_certificate_is_for_a_public_key_and_a_name(office: Path) -> None:
    with pytest.raises(CertificateError, match="is no name of a site"):
        make_site(office, "../x", office / "north.key.pub")
    with pytest.raises(CertificateError, match=r"give the site's \.pub file"):
        make_site(office, "north", office / "north.key")
    with pytest.raises(ExchangeError, match=r"exchange\.authority is set but exchange\.certificate is not"):
        Exchange("127.0.0.1:0", lambda facts: None, authority=office / "ca.crt")


# --- one admission for both links ---


class Nodes:
    """Flower's grid with nodes whose joins say what a test wants."""

    def __init__(self, greetings: dict[int, Any]) -> None:
        self.greetings = greetings

    def get_nodes(self) -> list[Any]:
        return [SimpleNamespace(node_id=n, name="", last_activated_at="now") for n in self.greetings]

    def push_messages(self, messages: list[Any]) -> list[str]:
        return [str(message.metadata.dst_node_id) for message in messages]

    def pull_messages(self, numbers: list[str]) -> list[Any]:
        return [
            SimpleNamespace(
                metadata=SimpleNamespace(reply_to_message_id=number, src_node_id=int(number)),
                has_error=lambda: False,
                content=to_records({}, self.greetings[int(number)]),
            )
            for number in numbers
        ]


@pytest.mark.parametrize(
    ("second", "reason"),
    [
        ({"name": "../../etc"}, "a site's name has letters, digits"),
        ({"name": ["north"]}, "a site's name has letters, digits"),
        ({"name": "north"}, "site north is here already"),
        ({}, "cannot be read"),
    ],
)
def test_plain_messages_admit_no_name_that_the_stream_refuses(
    small: Small, second: Facts, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)  # as in a ServerApp's process
    grid, notices = Nodes({1: {"name": "north"}, 2: second}), list[Facts]()
    with pytest.raises(JoinError, match="1 of 2 sites joined"):
        MessageLink(grid, small(), "run", lambda facts: None, lambda _, facts: notices.append(facts))  # type: ignore[arg-type]
    assert any(reason in str(facts.get("reason")) for facts in notices), notices
