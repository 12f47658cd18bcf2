"""The far ends of the exchange benchmark: sites that say back what they are told, and the Flower app that asks them.

As a program it is one site, `python echo.py raw ADDRESS SIZE...` or `python echo.py stream ADDRESS NAME TOKEN [CA]`.
Copied into an app bundle it is the ServerApp `server` and the ClientApp `client` of the ways `message` and `flower`.
"""

from __future__ import annotations

import json
import queue
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedstill.client.session import Door, Session
from fedstill.common.config.files import load_run
from fedstill.common.wire import Ask, Facts, Failure, Reply, from_records, to_records
from fedstill.common.wire.frames import grpc_options

if TYPE_CHECKING:
    from fedstill.server.link import Link

RAW = "/bench.Raw/Echo"
PAYLOADS = {"1KB": 1 << 10, "16KB": 16 << 10, "1MB": 1 << 20, "100MB": 100 << 20}
DEADLINE = 120.0

Outbox = queue.SimpleQueue[Iterable[bytes] | None]
server = ServerApp()  # two plain assignments: `flwr build` reads them without running the file
client = ClientApp()


def raw_options() -> list[tuple[str, int]]:
    """fedstill's channel options without its window: the yardstick has gRPC's own."""
    ours = ("grpc.http2.bdp_probe", "grpc.http2.lookahead_bytes")
    return [(name, value) for name, value in grpc_options(20.0) if name not in ours]


def payload_of(size: int) -> np.ndarray:
    """The same numbers in every process."""
    return np.random.default_rng(1).random(size // 4, dtype=np.float32)


def same(sent: np.ndarray, came: np.ndarray) -> None:
    """Abort on an echo that is not byte for byte what was sent."""
    equal = sent.dtype == came.dtype and sent.shape == came.shape
    if not equal or not np.array_equal(sent.view(np.uint8), came.view(np.uint8)):
        raise SystemExit(f"a wrong echo: {came.dtype} {came.shape} for {sent.dtype} {sent.shape}, or other bytes")


# --- raw gRPC: each stream carries payloads of one size, so that no framing is needed ---


def gather(messages: Iterable[bytes], size: int) -> Iterator[list[bytes]]:
    """The payloads of a stream, each as the messages it came in."""
    parts: list[bytes] = []
    missing = size
    for message in messages:
        parts.append(message)
        missing -= len(message)
        if missing == 0:
            yield parts
            parts, missing = [], size


def sending(outbox: Outbox) -> Iterator[bytes]:
    """What gRPC sends: the messages of every payload that is put into the queue."""
    while (messages := outbox.get()) is not None:
        yield from messages


def raw_site(address: str, sizes: list[int]) -> None:
    """One stream a size to the benchmark's server; every payload is sent back when it is complete."""

    def echo(size: int) -> None:
        outbox: Outbox = queue.SimpleQueue()
        call = channel.stream_stream(RAW)(sending(outbox), metadata=[("size", str(size))])
        for parts in gather(call, size):
            outbox.put(parts)
        outbox.put(None)

    with grpc.insecure_channel(address, raw_options()) as channel:
        streams = [threading.Thread(target=echo, args=(size,)) for size in sizes]
        for stream in streams:
            stream.start()
        for stream in streams:
            stream.join()


# --- fedstill's stream ---


def stream_site(address: str, name: str, token: str, authority: Path | None) -> None:
    """fedstill's own session, with an echo in place of a model."""
    Session(Door(address, token, authority), {"name": name}, lambda ask: Reply(name, ask.arrays)).serve()


# --- Flower messages: fedstill's MessageLink, and Flower alone ---


@client.query("join")
def join(message: Message, context: Context) -> Message:
    """What MessageLink asks first: who are you?"""
    return Message(to_records({}, {"name": f"site{context.node_config['partition-id']}"}), reply_to=message)


@client.query("message")
def answer_message(message: Message, context: Context) -> Message:
    """An Ask of MessageLink's, unpacked and packed as fedstill.client.app does."""
    arrays, _ = from_records(message.content)
    return Message(to_records(arrays, {"metrics": {}}), reply_to=message)


@client.query("flower")
def answer_flower(message: Message, context: Context) -> Message:
    """The content as it came."""
    return Message(message.content, reply_to=message)


@server.main()
def measure(grid: Grid, context: Context) -> None:
    """Both ways in turn; the times go to the file that the run configuration names."""
    from fedstill.server.link import MessageLink  # here, so that the sites' processes start as fast as they can

    config = load_run(str(context.run_config["config"]))
    link = MessageLink(grid, config, "bench", lambda facts: None, lambda kind, facts: None)
    times: dict[str, dict[str, list[float]]] = {}
    for name, repeats in json.loads(str(context.run_config["repeats"])).items():
        sent = payload_of(PAYLOADS[name])
        times[name] = {"message": [], "flower": []}
        for _ in range(repeats):
            times[name]["message"].append(time_message(link, sent))
            times[name]["flower"].append(time_flower(grid, sent))
            write_whole(Path(str(context.run_config["times"])), times)
    link.close({})


def time_message(link: Link, sent: np.ndarray) -> float:
    """Seconds of one Ask through MessageLink.deliver."""
    ask = Ask("query.message", {"echo": sent})
    began = time.perf_counter()
    replies = list(link.deliver(dict.fromkeys(link.sites, ask), DEADLINE))
    seconds = time.perf_counter() - began
    check_replies(sent, replies)
    return seconds


def check_replies(sent: np.ndarray, replies: list[Reply | Failure]) -> None:
    """Two Replies, both with what was sent."""
    echoes = [reply.arrays["echo"] for reply in replies if isinstance(reply, Reply)]
    if len(echoes) != 2:
        raise SystemExit(f"{len(echoes)} echoes of 2: {[reply for reply in replies if isinstance(reply, Failure)]}")
    for array in echoes:
        same(sent, array)


def time_flower(grid: Grid, sent: np.ndarray) -> float:
    """Seconds of one exchange with Flower's own means."""
    began = time.perf_counter()
    content = RecordDict({"arrays": ArrayRecord([sent]), "facts": ConfigRecord({})})
    messages = [Message(content, node, "query.flower") for node in grid.get_node_ids()]
    replies = list(grid.send_and_receive(messages, timeout=DEADLINE))
    came = [reply.content.array_records["arrays"].to_numpy_ndarrays()[0] for reply in replies]
    seconds = time.perf_counter() - began
    if len(came) != 2:
        raise SystemExit(f"{len(came)} answers of 2 through Flower")
    for array in came:
        same(sent, array)
    return seconds


def write_whole(path: Path, content: Facts) -> None:
    """Write so that a reader sees the old file or the new one."""
    path.with_suffix(".part").write_text(json.dumps(content))
    path.with_suffix(".part").replace(path)


if __name__ == "__main__":
    way, address, *rest = sys.argv[1:]
    if way == "raw":
        raw_site(address, [int(size) for size in rest])
    else:
        stream_site(address, rest[0], rest[1], Path(rest[2]) if len(rest) > 2 else None)
