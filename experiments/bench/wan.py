"""Seconds a round on lines between organisations, by method, beside what latency and rate allow: `make bench-wan`.

A coordinator and two sites, each on a host of its own (lines.py), one round of tiny BERTs over real streams. `plain` is
the same round on a line without delay and limit: computing, and what the programs themselves cost. Beside each time

    plain + exchanges x round trip + (bytes up + bytes down) x 8 / rate

with the bytes of one site, since each has a line of its own. The ratio says how near a round comes to that. FedID with
larger batches needs fewer exchanges; what that costs in accuracy is measured on frozen MiniLM, film reviews, in one
process. Figures go to experiments/bench/wan.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(HERE)]  # the tests' link serves here as well

from lines import Hosts, Line  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

PORT = 9093
SITES = 2
PLAIN = Line()
LINES = [PLAIN, *(Line(trip, rate) for rate in (100, 20) for trip in (10, 50, 200)), Line(50, 20, 0.001)]
RUN: dict[str, Any] = {
    "name": "wan",
    "rounds": 4,  # the first is not counted, since it is cold, nor the last, which ends with a test
    "data": {"private": 32, "public": 320, "labelled": 16, "test": 16, "partition": "iid"},
    "train": {"max_length": 8, "batch_size": 32},
    "report": {"alone": False, "centralized": False, "evaluate": "end"},
}
LORA = {"r": 8}
METHODS: dict[str, tuple[dict[str, Any], bool]] = {  # settings, and whether adapters alone are trained
    "fedid, batches of 32": ({"name": "fedid", "batch_size": 32, "local_epochs": 1, "distill_epochs": 1}, False),
    "fedid, one batch": ({"name": "fedid", "batch_size": 320, "local_epochs": 1, "distill_epochs": 1}, False),
    "ds-fl": ({"name": "ds-fl", "local_epochs": 1, "distill_epochs": 1}, False),
    "fedavg": ({"name": "fedavg", "local_epochs": 1}, False),
    "fedavg, LoRA": ({"name": "fedavg", "local_epochs": 1}, True),
}
BATCHES = (16, 64, 320)
SEEDS = range(1, 4)


Turns = dict[str, list[dict[str, dict[str, float]]]]  # by line: of each turn, every method's round


def settings(method: str) -> str:
    """A run of one method, as JSON."""
    parameters, adapters = METHODS[method]
    model = {"model": "tiny-bert", **({"lora": LORA} if adapters else {})}
    sites = [{"name": f"site-{number}", **model} for number in range(SITES)]
    return json.dumps({**RUN, "method": parameters, "central": model, "sites": sites})


# --- the federation ---


def site(number: int, address: str, folder: str) -> None:
    """A site's process: a session for every run that is written to its standard input."""
    from fedstill.client.own_task import make_node
    from fedstill.client.session import Door, Session
    from fedstill.common.config.files import load_run

    for turn, text in enumerate(sys.stdin):
        token, config = json.loads(text)
        run = load_run(config)
        node = make_node(run, run.sites[number], "run", Path(folder) / f"{turn}")
        Session(Door(address, token, patience=60), node.greeting(), node.answer).serve()


def measure(turns: int) -> Turns:
    """Every method on every line, in turns; this process becomes the coordinator's host."""
    found: Turns = {str(line): [] for line in LINES}
    with tempfile.TemporaryDirectory() as folder, Hosts(SITES) as hosts:
        sites = []
        for number in range(SITES):
            words = [str(number), f"{hosts.address(number)}:{PORT}", f"{folder}/site-{number}"]
            sites.append(hosts.popen(number, [sys.executable, __file__, "--site", *words], dict(os.environ)))
        for turn in range(turns):
            for line in LINES:
                hosts.change(line)
                here = Path(folder) / f"{turn}-{LINES.index(line)}"
                rows = {name: rounds_of(settings(name), here / name.replace(" ", "-"), sites) for name in METHODS}
                found[str(line)].append(rows)
                print(line, json.dumps(rows), flush=True)
        for process in sites:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(30)
    return found


def rounds_of(config: str, folder: Path, sites: list[subprocess.Popen[bytes]]) -> dict[str, float]:
    """The quickest counted round: its seconds, its exchanges, and the bytes of one site."""
    from fedstill.common.config.files import load_run
    from fedstill.common.wire import Ask, Failure, Reply
    from fedstill.server.exchange import Exchange
    from fedstill.server.federation import Federation
    from tests.federation.conftest import ExchangeLink

    seen: list[tuple[int, float, float, int, int]] = []  # round, begin, end, bytes up and down of the first site

    class Counted(ExchangeLink):
        def deliver(self, parts: dict[str, Ask], deadline: float) -> Iterator[Reply | Failure]:
            began, before = time.monotonic(), next(iter(self.traffic().values()))
            yield from super().deliver(parts, deadline)
            after = next(iter(self.traffic().values()))
            number = int(next(iter(parts.values())).settings.get("round", 0))
            seen.append((number, began, time.monotonic(), after[0] - before[0], after[1] - before[1]))

    run = load_run(config)
    federation = Federation(run, folder)
    exchange = Exchange(f"0.0.0.0:{PORT}", federation.admission(), patience=60)
    for number, process in enumerate(sites):
        assert process.stdin is not None
        process.stdin.write(json.dumps([exchange.issue_token(number), config]).encode() + b"\n")
        process.stdin.flush()
    if not exchange.wait_for(SITES, 180):
        raise RuntimeError("the sites did not come")
    link = Counted(exchange, [site.name for site in run.sites])
    try:
        federation.run(link)
    finally:
        link.close({"status": "finished"})
    rounds = []
    for number in range(2, run.rounds):
        asks = [each for each in seen if each[0] == number]
        rounds.append(
            {
                "seconds": asks[-1][2] - asks[0][1],
                "exchanges": len(asks),
                "up": sum(each[3] for each in asks),
                "down": sum(each[4] for each in asks),
            }
        )
    return min(rounds, key=lambda each: each["seconds"])


# --- the table ---


def allowed(plain: float, line: Line, found: dict[str, float]) -> float:
    """What latency and rate allow, in seconds."""
    return plain + found["exchanges"] * line.trip / 1000 + 8 * (found["up"] + found["down"]) / (1e6 * line.rate)


def accuracy() -> dict[int, list[float]]:
    """FedID's central model by the size of its batches, frozen encoders, three seeds."""
    import fedstill

    frozen = {"model": "minilm", "freeze": "encoder"}
    run: dict[str, Any] = {
        "rounds": 3,
        "task": {"name": "film-reviews"},
        "data": {"private": 1200, "public": 320, "labelled": 96, "test": 400},
        "train": {"max_length": 64, "learning_rate": 3e-3, "keep": "end"},
        "central": frozen,
        "sites": [{"name": f"site-{number}", **frozen} for number in range(3)],
        "report": {"alone": False, "centralized": False, "evaluate": "end"},
    }
    scores: dict[int, list[float]] = {}
    for size in BATCHES:
        method = {"name": "fedid", "batch_size": size, "local_epochs": 3, "distill_epochs": 5, "schedule": "run"}
        for seed in SEEDS:
            with tempfile.TemporaryDirectory() as runs:
                config = json.dumps({**run, "method": method, "seed": seed})
                scores.setdefault(size, []).append(fedstill.run(config, runs=runs).central["accuracy"])
    return scores


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--site", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.site:
        site(int(given.site[0]), given.site[1], given.site[2])
        return
    load, scores = os.getloadavg()[0], accuracy()
    report(measure(given.turns), scores, load)


def report(turns: Turns, scores: dict[int, list[float]], load: float) -> None:
    """Print the tables; write the figures."""
    quickest = {
        line: {method: min((each[method] for each in found), key=lambda row: row["seconds"]) for method in METHODS}
        for line, found in turns.items()
    }
    console, rows = Console(width=130), list[dict[str, Any]]()
    table = Table(title="seconds a round, beside what the line allows; quickest turn")
    for column in ("line", *METHODS):
        table.add_column(column, justify="left" if column == "line" else "right")
    for line in LINES:
        cells = []
        for method in METHODS:
            found, plain = quickest[str(line)][method], quickest[str(PLAIN)][method]["seconds"]
            best = plain if line == PLAIN else allowed(plain, line, found)
            cells.append(f"{found['seconds']:.2f} / {best:.2f}")
            ratio = round(found["seconds"] / best, 3)
            rows.append({"line": str(line), "method": method, **found, "allowed": best, "ratio": ratio})
        table.add_row(str(line), *cells)
    sent = quickest[str(PLAIN)]
    table.add_row("exchanges", *(f"{sent[method]['exchanges']}" for method in METHODS))
    table.add_row("kB up, down", *(f"{sent[m]['up'] / 1e3:.1f}, {sent[m]['down'] / 1e3:.1f}" for m in METHODS))
    console.print(table)
    for size, found in scores.items():
        spread = statistics.stdev(found)
        console.print(f"FedID in batches of {size}: central model {statistics.mean(found):.3f} ± {spread:.3f}")
    facts = {"date": str(date.today()), "cores": os.cpu_count(), "load before": load, "rows": rows, "accuracy": scores}
    (HERE / "wan.json").write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
