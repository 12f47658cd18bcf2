"""A site that says nonsense, is gone or comes back: the others go on, nothing is counted twice, nothing is lost."""

from __future__ import annotations

import json
import shutil
import socket
import threading
import time
from collections.abc import Callable

import grpc
import numpy as np
import pytest

from fedstill.client.session import Door, Session, SessionRefused
from fedstill.common import checkpoint
from fedstill.common.config import RunConfig
from fedstill.common.lock import only_one
from fedstill.common.wire import Ask, Failure, Reply, WireError, items
from fedstill.common.wire.frames import METHOD, REPLY, TOKEN, Frame, cut, grpc_options
from fedstill.server.app import RunBusy, run_federation
from fedstill.server.exchange import Exchange, ExchangeError
from fedstill.server.link import JoinError, LocalLink
from fedstill.strategies.base import QuorumLost
from tests.conftest import without_times

from .cable import Cable
from .conftest import Federation, spoil, streams, with_nan

Make = Callable[..., Federation]
Small = Callable[..., RunConfig]


@pytest.mark.parametrize(
    "method",
    ["ds-fl", "mhat", "logit-fedavg", "fedmd", "cronus", "fedkd", "adafd", "sinkhorn", "entropy", "fedid"],
)
def test_a_site_with_nan_is_left_out_of_the_step_and_logged(federation: Make, small: Small, method: str) -> None:
    changes = [
        "exchange.quorum=0.5",
        "rounds=1",
        f"method.name={method}",
        "report.alone=false",
        "method.distill_epochs=1",
    ]
    changes += ["method.noise_texts=8"] if method in ("sinkhorn", "entropy") else []
    one = federation(small(*changes))
    spoil(one.nodes[0], with_nan)
    one.run()
    left = one.events("left_out")
    verb = "query.logits" if method == "fedid" else "query.predictions"
    assert [(e["site"], e["verb"]) for e in left][:1] == [("north", verb)]
    assert all("NaN" in e["reason"] for e in left)
    alone = federation(small(*changes))  # with the weight of the other renormalised to one, it is the only teacher
    alone.nodes = alone.nodes[1:]
    alone.run(LocalLink(alone.nodes))
    for name, value in one.central.weights().items():
        assert np.array_equal(value, alone.central.weights()[name])


def other_rows(ask: Ask, reply: Reply) -> Reply:
    if "items" not in reply.arrays:
        return reply
    return Reply(reply.node, {**reply.arrays, "items": items(ask.arrays["rows"][::-1])}, reply.metrics)


def other_shape(ask: Ask, reply: Reply) -> Reply:
    if "logits" not in reply.arrays:
        return reply
    return Reply(reply.node, {**reply.arrays, "logits": reply.arrays["logits"][:, :1].copy()}, reply.metrics)


@pytest.mark.parametrize(("change", "reason"), [(other_rows, "other items"), (other_shape, "shape")])
def test_fedid_goes_on_without_a_site_that_answers_wrongly(
    federation: Make, small: Small, change: Callable[[Ask, Reply], Reply], reason: str
) -> None:
    made = federation(small("exchange.quorum=0.5", "rounds=1", "method.distill_epochs=1"))
    spoil(made.nodes[1], change)
    assert made.run()["status"] == "finished"
    left = made.events("left_out")
    assert {e["site"] for e in left} == {"south"}
    assert len(left) == 3  # once a batch
    assert all(reason in e["reason"] for e in left)


def test_under_the_quorum_the_run_stops_and_can_be_resumed(federation: Make, small: Small) -> None:
    whole = federation(small("rounds=2"))
    whole.run()
    broken = federation(small("rounds=2"), "broken")
    calls = []

    def fail_in_round_two(ask: Ask, reply: Reply) -> Reply:
        calls.append(ask.settings.get("round"))
        return with_nan(ask, reply) if ask.settings.get("round") == 2 else reply

    spoil(broken.nodes[0], fail_in_round_two)
    with pytest.raises(QuorumLost, match=r"round 2.*1 of 2 sites.*can be resumed"):
        broken.run()
    again = federation(small("rounds=2"), "broken")
    summary = again.run(resume=True)
    assert again.events("resumed")[-1]["round"] == 1
    assert again.weights() == whole.weights()
    assert without_times(summary) == without_times(json.loads((whole.folder / "run/summary.json").read_text()))


def test_a_damaged_newest_checkpoint_costs_one_round_and_nothing_else(federation: Make, small: Small) -> None:
    whole = federation(small("rounds=3", "report.centralized=false", "report.alone=false"))
    whole.run()
    first = federation(small("rounds=3", "report.centralized=false", "report.alone=false"), "again")
    first.run()
    file = first.record.checkpoints / "round-00003/arrays.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    again = federation(small("rounds=3", "report.centralized=false", "report.alone=false"), "again")
    again.run(resume=True)
    assert "round-00003/arrays.safetensors: damaged" in again.events("damaged")[0]["problem"]
    assert again.events("resumed")[0]["round"] == 2
    assert again.weights() == whole.weights()


def test_a_site_that_lost_its_state_starts_anew_and_the_log_says_so(federation: Make, small: Small) -> None:
    federation(small(), "lost").run()
    again = federation(small("rounds=3"), "lost")
    shutil.rmtree(again.nodes[0].folder)
    assert again.run(resume=True)["status"] == "finished"
    assert again.events("site_reset")[0]["site"] == "north"


def test_no_round_is_done_again_because_a_site_missed_it(federation: Make, small: Small) -> None:
    changes = ("exchange.quorum=0.5", "report.centralized=false", "report.alone=false", "method.name=ds-fl")
    first = federation(small("rounds=3", *changes), "missed")
    first.run()
    shutil.rmtree(first.record.checkpoints / "round-00003")  # the server was killed while it wrote it
    north, south = (node.folder / "checkpoints" for node in first.nodes)
    for number in (1, 2):
        shutil.rmtree(north / f"round-{number:05d}")  # north was away until round 3
    again = federation(small("rounds=4", *changes), "missed")
    again.run(resume=True)
    assert again.events("resumed")[-1]["round"] == 2
    assert again.events("site_reset")[-1]["site"] == "north"
    started = [event["round"] for event in again.events("round_started")]
    assert started == [1, 2, 3, 3, 4]
    for folder in (north, south):
        assert checkpoint.rounds(folder)[-1] == 4
    shutil.rmtree(again.record.checkpoints / "round-00004")
    for number in (2, 3):
        shutil.rmtree(north / f"round-{number:05d}", ignore_errors=True)
        shutil.rmtree(south / f"round-{number:05d}", ignore_errors=True)
    last = federation(small("rounds=4", *changes), "missed")  # the sites hold round 4 alone, the server 1 to 3
    last.run(resume=True)
    assert last.events("resumed")[-1]["round"] == 3


def test_a_run_that_is_worked_on_is_left_alone_by_a_second_server_app(federation: Make, small: Small) -> None:
    made = federation(small(), "busy")
    events = made.folder / "run/events.jsonl"
    with only_one(made.folder / "run/running.lock", AssertionError()), pytest.raises(RunBusy, match="leaves it alone"):
        run_federation(None, made.config, made.folder / "run", True)  # type: ignore[arg-type]
    assert not events.exists()


def test_a_full_disk_at_a_site_stops_the_run_with_the_file_named(
    federation: Make, small: Small, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = federation(small())
    write = checkpoint._write

    def full(path: object, data: bytes, mode: int) -> str:
        if "round-00001" in str(path) or "-00001" in str(path):
            path.symlink_to("/dev/full")  # type: ignore[attr-defined]
        return write(path, data, mode)  # type: ignore[arg-type]

    monkeypatch.setattr(checkpoint, "_write", full)
    with pytest.raises(QuorumLost):
        made.run()
    assert "round-00001: cannot be written (No space left" in made.events("left_out")[0]["reason"]


# --- streams ---


def test_streams_give_the_same_weights_as_plain_calls(federation: Make, small: Small) -> None:
    one, two = federation(small()), federation(small())
    first = one.run()
    with streams(two) as link:
        second = two.run(link)
    assert one.weights() == two.weights()
    assert without_times(first) == without_times(second)
    assert all(site["bytes_up"] > 1000 for site in second["sites"].values())


def test_broken_connections_heal_and_no_ask_is_worked_twice(federation: Make, small: Small) -> None:
    one, two = federation(small()), federation(small())
    one.run()
    worked: dict[str, list[tuple[int, int]]] = {}
    cable: list[Cable] = []

    def through(port: int) -> int:
        cable.append(Cable(port))
        return cable[0].port

    for node in two.nodes:

        def note(ask: Ask, reply: Reply, name: str = node.name) -> Reply:
            place = (ask.settings["round"], ask.settings["step"])
            worked.setdefault(name, []).append(place)
            if len(worked[name]) in (3, 6, 9, 14) and name == "north":
                cable[0].pull()  # while the Reply of this Ask is still to be sent
            return reply

        spoil(node, note)
    with streams(two, through) as link:
        two.run(link)
    assert cable[0].cuts == 4
    assert two.events("disconnected")
    for places in worked.values():
        assert len(places) == len(set(places))
    assert one.weights() == two.weights()


def echo(ask: Ask) -> Reply:
    return Reply("echo", ask.arrays, ask.settings)


def serve(exchange: Exchange, **door: object) -> tuple[Session, threading.Thread, list[BaseException]]:
    token = exchange.issue_token(1)
    session = Session(Door(f"127.0.0.1:{exchange.port}", token, **door), {"name": "echo"}, echo)  # type: ignore[arg-type]
    errors: list[BaseException] = []

    def work() -> None:
        try:
            session.serve()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return session, thread, errors


def call(exchange: Exchange, messages: list[bytes], token: str) -> grpc.RpcError:
    """What a caller gets who says `messages`."""
    with grpc.insecure_channel(f"127.0.0.1:{exchange.port}", grpc_options(20)) as channel:
        with pytest.raises(grpc.RpcError) as error:
            list(channel.stream_stream(METHOD)(iter(messages), metadata=((TOKEN, token),)))
        return error.value


def test_wrong_spent_and_missing_tokens_are_refused_and_nobody_is_disturbed() -> None:
    exchange = Exchange("127.0.0.1:0", lambda facts: None)
    session, thread, _ = serve(exchange)
    assert exchange.wait_for(1, 10)
    list(exchange.deliver({"echo": Ask("x")}, 10))
    for token in ("guess", "", session.door.token):  # the last one was used by the site itself
        error = call(exchange, list(cut(Frame(1, facts={"name": "echo"}))), token)
        assert error.code() is grpc.StatusCode.UNIMPLEMENTED
    [reply] = exchange.deliver({"echo": Ask("x", {"a": np.arange(3)})}, 10)
    assert isinstance(reply, Reply)
    exchange.close({})
    thread.join(10)
    assert not thread.is_alive()


@pytest.mark.parametrize("messages", [[b"GET / HTTP/1.1"], [b""], [b"FST1" + bytes(21)], [bytes(100)]])
def test_malformed_frames_are_refused_with_a_reason(messages: list[bytes]) -> None:
    exchange = Exchange("127.0.0.1:0", lambda facts: None)
    error = call(exchange, messages, exchange.issue_token(1))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error.details()
    exchange.close({})


def test_what_cannot_travel_is_an_error_of_its_ask_and_the_stream_goes_on() -> None:
    exchange = Exchange("127.0.0.1:0", lambda facts: None, limit=1 << 20)
    answers = {
        "number": Reply("echo", {}, {"loss": np.float32(1)}),
        "type": Reply("echo", {"a": np.zeros(2, np.uint16)}),
        "size": Reply("echo", {"a": np.zeros(2 << 20, np.uint8)}),
        "good": Reply("echo", {"a": np.zeros(1 << 20, np.uint8)}),
    }
    reasons = {"number": "float32", "type": "uint16, which does not travel", "size": "more than the 1,048,576"}
    door = Door(f"127.0.0.1:{exchange.port}", exchange.issue_token(1), limit=1 << 20)
    session = Session(door, {"name": "echo"}, lambda ask: answers[ask.verb])
    thread = threading.Thread(target=session.serve, daemon=True)
    thread.start()
    assert exchange.wait_for(1, 10)
    for verb, reason in reasons.items():
        [failure] = exchange.deliver({"echo": Ask(verb)}, 10)
        assert isinstance(failure, Failure)
        assert reason in failure.reason
    with pytest.raises(WireError, match="more than the 1,048,576"):
        list(exchange.deliver({"echo": Ask("good", {"a": np.zeros(2 << 20, np.uint8)})}, 10))
    [reply] = exchange.deliver({"echo": Ask("good")}, 10)
    assert isinstance(reply, Reply)
    assert session.connections == 1
    exchange.close({})
    thread.join(10)


def test_an_oversized_frame_is_refused_at_the_door() -> None:
    exchange = Exchange("127.0.0.1:0", lambda facts: None, limit=1 << 20)
    error = call(exchange, list(cut(Frame(REPLY, 1, {"a": np.zeros(2 << 20, np.uint8)}))), exchange.issue_token(1))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "more than the 1,048,576 allowed" in error.details()
    exchange.close({})


def test_another_public_set_other_labels_and_strangers_are_refused_with_the_difference(
    federation: Make, small: Small
) -> None:
    made = federation(small())
    greeting = made.nodes[0].greeting()
    admit = made.admit()
    assert admit(greeting) is None
    said = admit({**greeting, "public": "0" * 64})
    assert said is not None
    assert "another public set (sha256 0000000000000000..., 40 texts)" in said
    said = admit({**greeting, "labels": ["positive", "negative"]})
    assert said is not None
    assert "['positive', 'negative'] in this order, the run has ['negative', 'positive']" in said
    said = admit({**greeting, "name": "mallory"})
    assert said is not None
    assert "is not in this run; its sites are: north, south" in said
    made.nodes[1].fingerprint = "0" * 64
    with pytest.raises(JoinError, match="another public set"):
        LocalLink(made.nodes, admit)


def test_a_site_that_is_refused_hears_why() -> None:
    exchange = Exchange("127.0.0.1:0", lambda facts: "your public set differs")
    _, thread, errors = serve(exchange)
    thread.join(10)
    [error] = errors
    assert isinstance(error, SessionRefused)
    assert "your public set differs" in str(error)
    exchange.close({})


def test_a_late_site_is_left_out_and_its_late_answer_is_not_counted() -> None:
    exchange = Exchange("127.0.0.1:0", lambda facts: None)
    token = exchange.issue_token(1)

    def slow(ask: Ask) -> Reply:
        time.sleep(float(ask.settings.get("sleep", 0)))
        return Reply("slow", {}, ask.settings)

    session = Session(Door(f"127.0.0.1:{exchange.port}", token), {"name": "slow"}, slow)
    thread = threading.Thread(target=session.serve, daemon=True)
    thread.start()
    assert exchange.wait_for(1, 10)
    [late] = exchange.deliver({"slow": Ask("x", settings={"sleep": 1.5, "n": 1})}, 0.3)
    assert "no answer within" in late.reason  # type: ignore[union-attr]
    [reply] = exchange.deliver({"slow": Ask("x", settings={"n": 2})}, 10)
    assert reply.metrics["n"] == 2  # type: ignore[union-attr]
    exchange.close({})
    thread.join(10)


def test_a_port_in_use_says_what_to_change() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ExchangeError, match=rf"cannot listen on 127.0.0.1:{port}.*set exchange.listen"):
            Exchange(f"127.0.0.1:{port}", lambda facts: None)


def test_half_a_gigabyte_passes_and_comes_back_whole() -> None:
    exchange = Exchange("127.0.0.1:0", lambda facts: None)
    _, thread, _ = serve(exchange)
    assert exchange.wait_for(1, 10)
    state = {"w": np.arange(125_000_000, dtype=np.float32)}
    [reply] = exchange.deliver({"echo": Ask("x", state)}, 120)
    assert isinstance(reply, Reply)
    assert np.array_equal(reply.arrays["w"], state["w"])
    exchange.close({})
    thread.join(10)


def test_a_site_whose_training_breaks_down_is_named_with_the_key_to_change(federation: Make, small: Small) -> None:
    changes = ("exchange.quorum=0.5", "rounds=1", "method.name=ds-fl", "report.alone=false")
    made = federation(small(*changes, "sites.south.learning_rate=1e30"))
    made.run()
    [warning] = [event for event in made.events("warning") if "broke down" in event["what"]]
    assert warning["who"] == "south"
    assert "sites.south.learning_rate" in warning["change"]
