"""How long a federation takes to its first training step, phase by phase: `make bench-start`.

`fedstill run experiments/demo.toml` as a user types it, four sites: as real processes, and in one process. Phases:

  checked   the run's folder is there: `fedstill check` is done
  server    real processes: SuperLink and ServerApp run, and the run's first event is written
  open      the central model and the texts are loaded, and the stream listens
  first     the first site has joined: its SuperNode has fetched the invitation and its ClientApp has loaded a model
  joined    the last site has joined
  training  the first Ask to train has gone out

The run is stopped there. CPU seconds are of all processes together; on a busy machine they tell more than the clock.
The medians of the turns, and every turn, go to experiments/bench/start.json.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PHASES = ("checked", "server", "open", "first", "joined", "training")
PATIENCE = 300


def events(folder: Path) -> list[dict[str, Any]]:
    path = folder / "events.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")] if path.exists() else []


def reached(folder: Path) -> dict[str, float]:
    """When each phase ended, by the wall clock."""
    ends = {"checked": (folder / "config.toml").stat().st_mtime} if (folder / "config.toml").exists() else {}
    for event in events(folder):
        when, name = datetime.fromisoformat(event["time"]).timestamp(), event["event"]
        if name == "run_started":
            ends.setdefault("server", when)
        elif name == "joining":
            ends.setdefault("open", when)
        elif name == "site_joined":
            ends.setdefault("first", when)
        elif name == "joined":
            ends.setdefault("joined", when)
            ends.setdefault("open", when)  # in one process nobody waits at a door
            ends.setdefault("first", when)
        elif name == "asked" and (event["verb"] == "evaluate.alone" or event["verb"].startswith("train.")):
            ends.setdefault("training", when)
    return ends


def cpu_of(process: psutil.Process) -> float:
    """CPU seconds of a process and all that live below it."""
    total = 0.0
    for each in [process, *process.children(recursive=True)]:
        try:
            times = each.cpu_times()
        except psutil.Error:
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total


def turn(on: str, checked: bool) -> dict[str, float]:
    """One start; seconds since the command at which each phase ended."""
    with tempfile.TemporaryDirectory() as runs:
        command = [str(Path(sys.executable).parent / "fedstill"), "run", str(ROOT / "experiments/demo.toml")]
        command += ["--on", on, "--runs", runs, "--check" if checked else "--no-check"]
        began = time.time()
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        running = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        watched, ends = psutil.Process(running.pid), dict[str, float]()
        try:
            while "training" not in ends:
                if running.poll() is not None or time.time() - began > PATIENCE:
                    raise RuntimeError(f"--on {on}: no training step after {time.time() - began:.0f} s")
                time.sleep(0.05)
                folders = [path for path in Path(runs).iterdir() if path.is_dir() and not path.is_symlink()]
                first, ends = ends.get("checked"), reached(folders[0]) if folders else {}
                if first is not None:
                    ends["checked"] = first  # the file is written again once the sites' rates are known
            cpu = cpu_of(watched)
        finally:
            running.send_signal(signal.SIGINT)
            try:
                running.wait(60)
            except subprocess.TimeoutExpired:
                running.kill()
                running.wait()
    return {**{name: ends[name] - began for name in PHASES}, "cpu": cpu}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3)
    turns = parser.parse_args().turns
    ways = {"local": ("local", False), "process": ("process", False), "local, checked first": ("local", True)}
    times: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    load = os.getloadavg()[0]
    for _ in range(turns):
        for name, (on, checked) in ways.items():
            times[name].append(turn(on, checked))
    medians = {
        name: {phase: statistics.median(each[phase] for each in found) for phase in (*PHASES, "cpu")}
        for name, found in times.items()
    }
    table = Table(
        title=f"seconds from the command to the first training step, median of {turns}; load before {load:.1f}"
    )
    for column in ("--on", *PHASES, "CPU s"):
        table.add_column(column, justify="left" if column == "--on" else "right")
    for name, row in medians.items():
        table.add_row(name, *(f"{row[phase]:.1f}" for phase in (*PHASES, "cpu")))
    Console().print(table)
    facts = {"date": f"{datetime.now():%Y-%m-%d}", "cores": os.cpu_count(), "load before": load, "turns": turns}
    rounded = {name: [{k: round(v, 2) for k, v in each.items()} for each in found] for name, found in times.items()}
    (HERE / "start.json").write_text(json.dumps({**facts, "median": medians, "turns": rounded}, indent=1) + "\n")


if __name__ == "__main__":
    main()
