"""How fast an Ask travels to two sites and both Replies come back: `make bench-exchange`.

One run, the same payloads (one float32 array, down and back up), five ways:

  raw         a plain bidirectional gRPC stream, bytes in and bytes out, no framing: the yardstick
  stream      fedstill's StreamLink data path: Exchange here, Session in two site processes
  stream_tls  the same with TLS
  message     fedstill's MessageLink.deliver, through a real flower-superlink and two flower-supernodes
  flower      Flower's own grid.send_and_receive, through the same processes

`raw`, `stream` and `stream_tls` have their two site processes each and take turns in blocks, `message` and `flower`
take turns one by one, so that a busy machine is busy for all of them. The stream ways use Exchange and Session
directly, with tokens from issue_token: the join through Flower happens once a run and is not what is measured.
raw answers a payload once it is complete, as a site must, but never puts its messages together into one array.
Every echo is compared byte for byte; the comparison is not timed. The times go to experiments/bench/exchange.json.
"""

from __future__ import annotations

import json
import os
import queue
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"  # read on import; else gRPC remarks on every process started here

import echo
import grpc
import numpy as np
import tomli_w
from echo import DEADLINE, PAYLOADS, Outbox, check_replies, gather, payload_of, raw_options, same, sending
from rich.console import Console
from rich.table import Table

from fedstill.common.config import ExchangeConfig, RunConfig
from fedstill.common.memory import imports_stay
from fedstill.common.wire import Ask
from fedstill.common.wire.frames import CHUNK
from fedstill.deploy import flower_commands as flower
from fedstill.deploy.coordinator.certificates import make_certificates
from fedstill.deploy.processes import Processes, free_port
from fedstill.server.exchange import Exchange

SITES = ("site0", "site1")
BLOCKS = 5  # raw, stream and stream_tls take turns this often
FAST = {"1KB": 60, "16KB": 60, "1MB": 8, "100MB": 1}  # exchanges a block
SLOW = {"1KB": 3, "16KB": 5, "1MB": 2, "100MB": 2}  # exchanges in all, message and flower each
WAYS = ("raw", "stream", "stream_tls", "message", "flower")

Times = dict[str, dict[str, list[float]]]
Exchanging = Callable[[np.ndarray], float]
console = Console()


class RawServer:
    """The yardstick's server end: a queue a stream out, one queue for all that comes back."""

    def __init__(self) -> None:
        self.outboxes: dict[int, list[Outbox]] = {size: [] for size in PAYLOADS.values()}
        self.arrivals: queue.SimpleQueue[list[bytes]] = queue.SimpleQueue()
        self.server = grpc.server(ThreadPoolExecutor(2 * len(PAYLOADS) + 2), options=raw_options())
        service, method = echo.RAW.strip("/").split("/")
        handler = grpc.stream_stream_rpc_method_handler(self._stream)
        self.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
        self.port = self.server.add_insecure_port("127.0.0.1:0")
        self.server.start()

    def _stream(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        size = int(dict(context.invocation_metadata())["size"])
        outbox: Outbox = queue.SimpleQueue()
        threading.Thread(target=self._read, args=(requests, size), daemon=True).start()
        self.outboxes[size].append(outbox)
        yield from sending(outbox)

    def _read(self, requests: Iterator[bytes], size: int) -> None:
        for parts in gather(requests, size):
            self.arrivals.put(parts)

    def exchange(self, sent: np.ndarray) -> float:
        """Seconds from handing the array's bytes to both streams until both echoes are complete."""
        began = time.perf_counter()
        data = sent.view(np.uint8).data
        for outbox in self.outboxes[sent.nbytes]:
            outbox.put(bytes(data[at : at + CHUNK]) for at in range(0, len(data), CHUNK))
        came = [self.arrivals.get(timeout=DEADLINE) for _ in SITES]
        seconds = time.perf_counter() - began
        for parts in came:
            same(sent, np.frombuffer(b"".join(parts), np.float32))
        return seconds

    def close(self) -> None:
        """End the streams, so that the sites end too."""
        for outbox in [outbox for outboxes in self.outboxes.values() for outbox in outboxes]:
            outbox.put(None)
        self.server.stop(grace=5).wait(10)


def start_site(processes: Processes, way: str, name: str, *arguments: str) -> None:
    """One site process; its log has its way and name."""
    processes.start(f"{way}-{name}", [sys.executable, str(Path(echo.__file__)), *arguments])


def open_raw(processes: Processes) -> RawServer:
    """The yardstick with both its sites connected."""
    raw = RawServer()
    for name in SITES:
        start_site(processes, "raw", name, "raw", f"127.0.0.1:{raw.port}", *map(str, PAYLOADS.values()))
    end = time.monotonic() + 60
    while any(len(outboxes) < len(SITES) for outboxes in raw.outboxes.values()):
        if time.monotonic() > end:
            raise SystemExit(f"the raw sites did not connect:\n{processes.tail('raw-site0')}")
        time.sleep(0.05)
    return raw


def open_stream(processes: Processes, folder: Path | None) -> Exchange:
    """fedstill's exchange with both its sites seated, with TLS where there is a folder for certificates."""
    made = make_certificates(folder) if folder is not None else None
    way = "stream" if made is None else "stream_tls"
    authority = [] if made is None else [str(made.authority)]
    exchange = Exchange(
        "127.0.0.1:0",
        lambda facts: None,
        certificate=None if made is None else made.certificate,
        key=None if made is None else made.key,
        most_sites=len(SITES),
    )
    for number, name in enumerate(SITES):
        arguments = [f"127.0.0.1:{exchange.port}", name, exchange.issue_token(number), *authority]
        start_site(processes, way, name, "stream", *arguments)
    if not exchange.wait_for(len(SITES), 60):
        raise SystemExit(f"the {way} sites did not connect:\n{processes.tail(f'{way}-site0')}")
    return exchange


def through(exchange: Exchange) -> Exchanging:
    """How to time one Ask over fedstill's stream, exactly as StreamLink.deliver hands it on."""

    def one(sent: np.ndarray) -> float:
        began = time.perf_counter()
        ask = Ask("query.echo", {"echo": sent})
        replies = list(exchange.deliver(dict.fromkeys(SITES, ask), DEADLINE))
        seconds = time.perf_counter() - began
        check_replies(sent, replies)
        return seconds

    return one


def measure_fast(folder: Path) -> Times:
    """raw, stream and stream_tls in turns."""
    times: Times = {name: {} for name in PAYLOADS}
    with Processes(folder / "logs", flower.environment()) as processes:
        raw, plain, secure = open_raw(processes), open_stream(processes, None), open_stream(processes, folder / "tls")
        ways = {"raw": raw.exchange, "stream": through(plain), "stream_tls": through(secure)}
        try:
            for name, repeats in FAST.items():
                console.print(f"{name}: {', '.join(ways)}", style="dim")
                sent = payload_of(PAYLOADS[name])
                for block in range(-1, BLOCKS):  # the first block warms up
                    for way, one in ways.items():
                        taken = [one(sent) for _ in range(repeats)]
                        times[name].setdefault(way, []).extend(taken if block >= 0 else [])
        finally:
            raw.close()
            plain.close({})
            secure.close({})
    return times


def write_app(folder: Path, times: Path) -> Path:
    """echo.py as a Flower app."""
    package = folder / "bench_echo"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    shutil.copy(echo.__file__, package / "echo.py")
    config = RunConfig(exchange=ExchangeConfig(link="messages", sites=len(SITES)))
    app = {
        "publisher": "fedstill",
        "fab-include": ["bench_echo/*.py"],
        "components": {"serverapp": "bench_echo.echo:server", "clientapp": "bench_echo.echo:client"},
        "config": {"config": config.to_json(), "times": str(times), "repeats": json.dumps(SLOW)},
    }
    project = {"name": "bench-echo", "version": "0.1.0", "license": "Apache-2.0", "dependencies": []}
    (folder / "pyproject.toml").write_text(tomli_w.dumps({"project": project, "tool": {"flwr": {"app": app}}}))
    return folder


def measure_slow(folder: Path) -> Times:
    """message and flower in turns, through Flower's real processes."""
    written, env, home = folder / "times.json", flower.environment(folder / "home"), folder / "home"
    bundle = write_app(folder / "app", written)
    port, fleet = free_port(), free_port()
    flower.write_connection(home, "bench", {"address": f"127.0.0.1:{port}", "insecure": True})
    local = ["--insecure", "--host", "127.0.0.1"]
    with Processes(folder / "logs", env) as processes:
        link = ["flower-superlink", *local, "--port", str(port), "--fleet-api-address", f"127.0.0.1:{fleet}"]
        processes.start("superlink", [*link, "--disable-runtime-dependency-installation"])
        processes.wait_for_port("superlink", port, 60)
        processes.wait_for_port("superlink", fleet, 60)
        for number, name in enumerate(SITES):
            node = ["flower-supernode", *local, "--port", str(free_port()), "--superlink", f"127.0.0.1:{fleet}"]
            processes.start(f"supernode-{name}", [*node, "--node-config", f"partition-id={number}"])
        run = flower.start_run(bundle, "bench", env, {})
        console.print("all sizes: message, flower (some minutes)", style="dim")
        times: Times = {}
        asked = time.monotonic()
        while sum(len(taken) for ways in times.values() for taken in ways.values()) < 2 * sum(SLOW.values()):
            time.sleep(1)
            times = json.loads(written.read_text()) if written.exists() else {}
            if time.monotonic() - asked > 20:
                asked = time.monotonic()
                if (status := flower.run_status(run, "bench", env)).startswith("finished:f"):
                    raise SystemExit(f"the Flower run ended as {status}:\n{processes.tail('superlink', 40)}")
    return times


def show(summary: dict[str, dict[str, dict[str, float]]]) -> None:
    """The table, and how the targets stand."""
    table = Table("payload", "way", *(f"{word} (ms)" for word in ("p50", "p95")), "n", "p50 / raw")
    for column in table.columns[2:]:
        column.justify = "right"
    for name, ways in summary.items():
        for way in WAYS:
            row = ways[way]
            ratio = row["p50"] / ways["raw"]["p50"]
            cells = [f"{1000 * row['p50']:,.2f}", f"{1000 * row['p95']:,.2f}", f"{row['n']:.0f}", f"{ratio:,.2f}"]
            table.add_row(name if way == "raw" else "", way, *cells, end_section=way == WAYS[-1])
    console.print(table)
    small, large = ({way: row["p50"] for way, row in summary[name].items()} for name in ("16KB", "100MB"))
    for target, found, met in (
        ("16 KB by stream: at most 1.3 x raw", ratio := small["stream"] / small["raw"], ratio <= 1.3),
        (
            "16 KB by stream: at least 1,000 x faster than message",
            ratio := small["message"] / small["stream"],
            ratio >= 1000,
        ),
        ("100 MB by stream: at most 1.15 x raw", ratio := large["stream"] / large["raw"], ratio <= 1.15),
    ):
        console.print(f"target: {target}; measured {found:,.2f} x: {'met' if met else 'NOT met'}", soft_wrap=True)


def main() -> None:
    """Measure, show, and write experiments/bench/exchange.json."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    imports_stay()  # as the ServerApp does
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fedstill-bench-") as scratch:
        fast, slow = measure_fast(Path(scratch) / "fast"), measure_slow(Path(scratch) / "slow")
    summary = {
        name: {
            way: {"p50": float(np.quantile(taken, 0.5)), "p95": float(np.quantile(taken, 0.95)), "n": len(taken)}
            for way, taken in {**fast[name], **slow[name]}.items()
        }
        for name in PAYLOADS
    }
    echo.write_whole(Path(__file__).with_suffix(".json"), summary)
    show(summary)
    console.print(f"{time.monotonic() - began:.0f} s in all; {Path(__file__).with_suffix('.json')}", style="dim")


if __name__ == "__main__":
    main()
