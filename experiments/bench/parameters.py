"""How fast and in how much memory a BERT-base state goes to the sites, back, and into a mean: `make bench-parameters`.

The state has BERT-base's names and shapes (438 MB) and random numbers. Three servers take turns, each a process with
site processes of its own:

  raw      a plain gRPC stream to two sites, bytes in and bytes out, no framing: the yardstick
  ours     fedstill's Exchange with two sites (Session), as FedAvg uses it
  ours4, ours8, ours16    the same with more sites, two turns each after the others, for their memory

`seconds` run from the Ask until every site's state is back at the server; `mean` is what FedAvg does besides: the copy
that travels, the check for NaN and for shapes, the mean and its way into the central model, array by array. Sites send
back what they get, so that the mean must be the state that was sent, number by number; it is compared every time.
Memory is the peak of the server process (VmHWM) above what it had with its sites connected and no state yet. In it are
the central state, the copy that travels, and what the check and the mean need.
"""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"  # read on import; else gRPC remarks on every process started here

import echo
import grpc
import numpy as np
from echo import Outbox, gather, raw_options, sending
from rich.console import Console
from rich.table import Table

from fedstill.common.maths.ensemble import mean_arrays, uniform
from fedstill.common.memory import imports_stay
from fedstill.common.states import copied
from fedstill.common.wire import Arrays, Ask, Failure, Reply, check_reply, same_shapes
from fedstill.common.wire.frames import CHUNK
from fedstill.deploy import flower_commands as flower
from fedstill.deploy.processes import Processes
from fedstill.server.exchange import Exchange

DEADLINE = 300.0
ROUNDS = 7
SERVERS = {"raw": ("raw", 2), "ours": ("ours", 2)}
CROWDS = {f"ours{count}": ("ours", count) for count in (4, 8, 16)}
ALL = SERVERS | CROWDS
console = Console()


def shapes(layers: int = 12, width: int = 768, words: int = 30522) -> dict[str, tuple[int, ...]]:
    """BERT-base with a classifier of two classes."""
    found: dict[str, tuple[int, ...]] = {}

    def linear(name: str, out: int, into: int) -> None:
        found[f"{name}.weight"], found[f"{name}.bias"] = (out, into), (out,)

    def norm(name: str) -> None:
        found[f"{name}.weight"], found[f"{name}.bias"] = (width,), (width,)

    for name, count in (("word", words), ("position", 512), ("token_type", 2)):
        found[f"embeddings.{name}"] = (count, width)
    norm("embeddings.norm")
    for layer in range(layers):
        for name in ("query", "key", "value", "attention"):
            linear(f"{layer}.{name}", width, width)
        norm(f"{layer}.attention.norm")
        linear(f"{layer}.intermediate", 4 * width, width)
        linear(f"{layer}.output", width, 4 * width)
        norm(f"{layer}.output.norm")
    linear("pooler", width, width)
    linear("classifier", 2, width)
    return found


SIZE = 4 * sum(int(np.prod(shape)) for shape in shapes().values())


def random_state() -> Arrays:
    """The same numbers every time."""
    rng = np.random.default_rng(1)
    return {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes().items()}


def memory(kind: str) -> int:
    """Bytes of this process: VmRSS now, or VmHWM at the most."""
    found = re.search(rf"^{kind}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return 1024 * int(found[1])


# --- the servers ---


class Raw:
    """A stream to each site, and one queue for all that comes back."""

    def __init__(self, processes: Processes, count: int) -> None:
        self.count, self.state = count, None
        self.outboxes: list[Outbox] = []
        self.arrivals: queue.SimpleQueue[list[bytes]] = queue.SimpleQueue()
        self.server = grpc.server(ThreadPoolExecutor(count + 2), options=raw_options())
        service, method = echo.RAW.strip("/").split("/")
        handler = grpc.stream_stream_rpc_method_handler(self._stream)
        self.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
        port = self.server.add_insecure_port("127.0.0.1:0")
        self.server.start()
        for number in range(count):
            start_site(processes, number, "raw", f"127.0.0.1:{port}", str(SIZE))
        end = time.monotonic() + 60
        while len(self.outboxes) < count:
            if time.monotonic() > end:
                raise SystemExit(processes.tail("site0"))
            time.sleep(0.05)

    def _stream(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        outbox: Outbox = queue.SimpleQueue()
        threading.Thread(target=self._read, args=(requests,), daemon=True).start()
        self.outboxes.append(outbox)
        yield from sending(outbox)

    def _read(self, requests: Iterator[bytes]) -> None:
        for parts in gather(requests, SIZE):
            self.arrivals.put(parts)

    def exchange(self) -> dict[str, float]:
        """Every byte of the state to every site and back."""
        self.state = (
            self.state if self.state is not None else np.concatenate([v.ravel() for v in random_state().values()])
        )
        data = self.state.view(np.uint8).data
        began = time.perf_counter()
        for outbox in self.outboxes:
            outbox.put(bytes(data[at : at + CHUNK]) for at in range(0, len(data), CHUNK))
        came = [self.arrivals.get(timeout=DEADLINE) for _ in range(self.count)]
        seconds = time.perf_counter() - began
        for parts in came:
            at = 0
            for part in parts:
                assert data[at : at + len(part)] == part
                at += len(part)
        return {"seconds": seconds}

    def close(self) -> None:
        """End the streams, so that the sites end too."""
        for outbox in self.outboxes:
            outbox.put(None)
        self.server.stop(grace=5).wait(10)


class Ours:
    """FedAvg's steps on fedstill's own exchange."""

    def __init__(self, processes: Processes, count: int) -> None:
        self.sites = [f"site{number}" for number in range(count)]
        self.central: Arrays = {}
        self.server = Exchange("127.0.0.1:0", lambda facts: None, most_sites=count)
        for number, name in enumerate(self.sites):
            token = self.server.issue_token(number)
            start_site(processes, number, "stream", f"127.0.0.1:{self.server.port}", name, token)
        if not self.server.wait_for(count, 60):
            raise SystemExit(processes.tail("site0"))

    def exchange(self) -> dict[str, float]:
        """The central state to every site and back, and their mean into the central state."""
        self.central = self.central or random_state()
        started = time.perf_counter()
        ask = Ask("query.echo", copied(self.central), check=same_shapes(self.central))
        began = time.perf_counter()
        outcomes = list(self.server.deliver(dict.fromkeys(self.sites, ask), DEADLINE))
        seconds = time.perf_counter() - began
        replies = {reply.node: reply for reply in outcomes if isinstance(reply, Reply)}
        if len(replies) < len(self.sites):
            raise SystemExit(str([outcome for outcome in outcomes if isinstance(outcome, Failure)]))
        for name in self.sites:
            check_reply(ask, replies[name])
        mean = mean_arrays({name: replies[name].arrays for name in self.sites}, uniform(self.sites))
        for name in self.central:
            np.copyto(self.central[name], mean[name])
        whole = time.perf_counter() - started
        for name, value in ask.arrays.items():  # weights of 1/2 and 1/4 are exact: the mean of echoes is what was sent
            assert np.array_equal(value, self.central[name]), name
        return {"seconds": seconds, "mean": whole - seconds}

    def close(self) -> None:
        """End the sessions."""
        self.server.close({})


def start_site(processes: Processes, number: int, *arguments: str) -> None:
    """One process that sends back what it gets."""
    processes.start(f"site{number}", [sys.executable, str(Path(echo.__file__)), *arguments])


def serve(kind: str, count: int, logs: Path) -> None:
    """A server process: an exchange for every line that comes in, its times and memory for a line out."""
    imports_stay()  # as the ServerApp does
    with Processes(logs, flower.environment()) as processes:
        server = (Raw if kind == "raw" else Ours)(processes, count)
        empty = memory("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        print(json.dumps({"ready": True}), flush=True)
        for _ in sys.stdin:
            times = server.exchange()
            print(json.dumps({**times, "peak": (memory("VmHWM") - empty) / SIZE}), flush=True)
        server.close()


# --- the benchmark ---


def ask(process: subprocess.Popen[str], line: str = "") -> dict[str, float]:
    """The next line that a server says, asked for by one if there is one."""
    assert process.stdin is not None
    assert process.stdout is not None
    if line:
        process.stdin.write(line + "\n")
        process.stdin.flush()
    said = process.stdout.readline()
    if not said:
        raise SystemExit(f"a server ended with {process.wait()}")
    found: dict[str, float] = json.loads(said)
    return found


def measure(folder: Path, servers: dict[str, tuple[str, int]], turns: int) -> dict[str, list[dict[str, float]]]:
    """The servers in turns; the first turn warms up."""
    processes = {
        name: subprocess.Popen(
            [sys.executable, __file__, kind, str(count), str(folder / name)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for name, (kind, count) in servers.items()
    }  # fmt: skip
    found: dict[str, list[dict[str, float]]] = {name: [] for name in servers}
    try:
        for process in processes.values():
            ask(process)
        for turn in range(-1, turns):
            for name, process in processes.items():
                said = ask(process, "go")
                console.print(f"{name}: {said}", style="dim")
                if turn >= 0:
                    found[name].append(said)
    finally:
        for process in processes.values():
            process.stdin.close()  # type: ignore[union-attr]
        for process in processes.values():
            process.wait(60)
    return found


def median(rows: list[dict[str, float]], *names: str) -> float:
    """Of the sum of these times."""
    return float(np.median([sum(row[name] for name in names) for row in rows]))


def best(rows: list[dict[str, float]]) -> float:
    """The shortest way there and back: what is left when nobody else works on the machine."""
    return min(row["seconds"] for row in rows)


def main() -> None:
    """Measure, show, and write experiments/bench/parameters.json."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fedstill-bench-") as scratch:
        rows = measure(Path(scratch), SERVERS, ROUNDS)
        for name, server in CROWDS.items():
            rows |= measure(Path(scratch), {name: server}, 1)
    raw, ours = median(rows["raw"], "seconds"), median(rows["ours"], "seconds")
    peaks = {name: max(row["peak"] for row in rows[name]) for name in rows if name != "raw"}
    summary = {
        "state_bytes": SIZE,
        "rounds": ROUNDS,
        "raw": raw,
        "ours": ours,
        "ratio": ours / raw,
        "ratio_of_the_best": best(rows["ours"]) / best(rows["raw"]),
        "ours_with_mean": median(rows["ours"], "seconds", "mean"),
        "ratio_with_mean": median(rows["ours"], "seconds", "mean") / raw,
        "peak_memory_in_states": {str(count): peaks[name] for name, (_, count) in ALL.items() if name != "raw"},
        "seconds_by_sites": {str(n): median(rows[name], "seconds") for name, (_, n) in ALL.items() if name != "raw"},
        "rows": rows,
    }
    echo.write_whole(Path(__file__).with_suffix(".json"), summary)
    table = Table("server", "sites", "there and back (s)", "mean (s)", "peak memory (states)")
    for name, (_, count) in ALL.items():
        mean = "" if name == "raw" else f"{median(rows[name], 'mean'):.2f}"
        peak = "" if name == "raw" else f"{peaks[name]:.2f}"
        table.add_row(name, str(count), f"{median(rows[name], 'seconds'):.2f}", mean, peak)
    console.print(table)
    for target, value, met in (
        ("at most 1.3 x raw (medians)", ours / raw, ours <= 1.3 * raw),
        (
            "at most 1.3 x raw (the best of each)",
            best(rows["ours"]) / best(rows["raw"]),
            best(rows["ours"]) <= 1.3 * best(rows["raw"]),
        ),
        *(
            (f"server below 2.5 states with {count} sites", peaks[name], peaks[name] < 2.5)
            for name, (_, count) in ALL.items()
            if name != "raw"
        ),
    ):
        console.print(f"target: {target}; measured {value:.2f}: {'met' if met else 'NOT met'}", soft_wrap=True)
    console.print(f"{time.monotonic() - began:.0f} s in all; {Path(__file__).with_suffix('.json')}", style="dim")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        serve(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
    else:
        main()
