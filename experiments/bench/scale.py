"""Many sites: seconds a round per participant and memory with 8 to 512 of them, a tenth drawn each round.

Tiny models and DS-FL on film reviews, 8 private texts a site. `process` is --on process with 8 sites in memory and the
others on disk; `simulation` is Flower's simulation on Ray with plain messages, whose actors keep 8 sites each. Each
size is a process of its own. Seconds are of whole rounds with their checkpoints, without joining and tests; memory is
the peak of that process, of the simulation the sum over its processes. The file experiments/bench/scale.json has the
figures and docs/pictures/scale.png draws them. `python scale.py process` measures one of the two alone,
`process 128` one size of it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import psutil

from fedstill.common.config import RunConfig
from fedstill.common.config.files import load_run
from fedstill.deploy.launch.process import assemble

SIZES = {"process": (8, 32, 128, 512), "simulation": (8, 32, 128, 512)}
ROUNDS = 3
ROOT = Path(__file__).resolve().parents[2]
RUN = """
rounds = ROUNDS
data = { private = PRIVATE, public = 64, labelled = 16, test = 32, partition = "iid" }
train = { max_length = 16, batch_size = 16, learning_rate = 1e-3 }
method = { name = "ds-fl", local_epochs = 1, distill_epochs = 1, participation = 0.1 }
central = { model = "tiny-bert" }
report = { alone = false, centralized = false, evaluate = "end" }
simulation = { resident = RESIDENT }
exchange = { link = "messages", join_deadline = 3000 }
sites = [{ name = "s", count = COUNT, model = "tiny-bert" }]
"""


def configured(count: int, resident: int) -> RunConfig:
    """The run with this many sites."""
    told = {"ROUNDS": ROUNDS, "PRIVATE": 8 * count, "RESIDENT": resident, "COUNT": count}
    text = RUN
    for name, value in told.items():
        text = text.replace(name, str(value))
    return load_run(text)


def in_process(count: int) -> dict[str, float]:
    """Seconds and memory of a federation in this process."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        made = assemble(configured(count, 8), Path(folder) / "run", Path(folder) / "sites", "run")
        link = made.link()
        joined = time.perf_counter()
        made.federation.run(link)
        most = peak_mb()  # before this benchmark reads the events: they would be a part of it
        return {"join": joined - began, **by_round(Path(folder) / "run", count), "mb": most}


def by_round(folder: Path, count: int) -> dict[str, float]:
    """Seconds per participant from the first round's start to the last one's end, its tests of all sites left out."""
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    starts = [event["time"] for event in events if event["event"] == "round_started"]
    drawn = max(1, round(0.1 * count))
    seconds = (stamp(starts[-1]) - stamp(starts[0])) / (len(starts) - 1)  # whole rounds, with their checkpoints
    return {"participants": drawn, "seconds_per_participant": seconds / drawn}


def stamp(text: str | float) -> float:
    """A time of an event in seconds."""
    from datetime import datetime

    return float(text) if isinstance(text, int | float) else datetime.fromisoformat(text).timestamp()


def peak_mb() -> float:
    """The most memory that this process had."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def in_simulation(count: int) -> dict[str, float]:
    """The same run by `fedstill run --on simulation`; memory is watched from outside."""
    with tempfile.TemporaryDirectory() as folder:
        file, runs = Path(folder) / "run.toml", Path(folder) / "runs"
        import tomli_w

        file.write_text(tomli_w.dumps(json.loads(configured(count, 8).model_dump_json(exclude_none=True))))
        command = [str(Path(sys.executable).parent / "fedstill"), "run", str(file), "--on", "simulation", "--no-check"]
        began, most = time.perf_counter(), 0
        process = subprocess.Popen([*command, "--runs", str(runs)], stdout=subprocess.DEVNULL)
        while process.poll() is None:
            most = max(most, sum(rss(p) for p in psutil.Process(process.pid).children(recursive=True)))
            time.sleep(0.5)
        if process.returncode:
            raise SystemExit(f"the simulation ended with {process.returncode}")
        [made] = [path.parent for path in runs.glob("*/events.jsonl") if not path.parent.is_symlink()]
        return {"whole": time.perf_counter() - began, **by_round(made, count), "mb": most / (1 << 20)}


def rss(process: psutil.Process) -> int:
    """Memory of a process that may be gone."""
    try:
        return int(process.memory_info().rss)
    except psutil.Error:
        return 0


def draw(found: dict[str, dict[str, dict[str, float]]]) -> None:
    """docs/pictures/scale.png: both figures over the number of sites."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4))
    for way, rows in found.items():
        counts = [int(count) for count in rows]
        axes[0].plot(counts, [row["seconds_per_participant"] for row in rows.values()], "o-", label=way)
        axes[1].plot(counts, [row["mb"] for row in rows.values()], "o-", label=way)
    for axis, title in zip(axes, ("seconds a round per participant", "peak memory, MB"), strict=True):
        axis.set(xscale="log", xlabel="sites", title=title, ylim=(0, None))
        axis.set_xticks([8, 32, 128, 512], ["8", "32", "128", "512"])
        axis.grid(alpha=0.3)
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(ROOT / "docs/pictures/scale.png", dpi=110)


def main() -> None:
    """Measure every size in a process of its own, print, draw and write experiments/bench/scale.json."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    target = Path(__file__).with_suffix(".json")
    found = json.loads(target.read_text()) if target.exists() else {}
    chosen = [int(part) for part in sys.argv[1:] if part.isdigit()]
    for way in [part for part in sys.argv[1:] if not part.isdigit()] or list(SIZES):
        rows = found[way] = found.get(way, {}) if chosen else {}
        for count in chosen or SIZES[way]:
            said = subprocess.run(
                [sys.executable, __file__, "one", way, str(count)], stdout=subprocess.PIPE, text=True, check=True
            )
            row = rows[str(count)] = json.loads(said.stdout.splitlines()[-1])
            print(f"{way}, {count} sites: {row['seconds_per_participant']:.3f} s a round per participant of "
                  f"{row['participants']:.0f}, {row['mb']:.0f} MB", flush=True)  # fmt: skip
            target.write_text(json.dumps(found, indent=1) + "\n")
        for key in ("seconds_per_participant", "mb"):
            smallest, largest = min(rows, key=int), max(rows, key=int)
            first, last = rows[smallest][key], rows[largest][key]
            print(f"target: {way}, {key} within 1.3 x from {smallest} to {largest}; measured "
                  f"{last / first:.2f} x: {'met' if last <= 1.3 * first else 'NOT met'}")  # fmt: skip
    draw(found)


if __name__ == "__main__":
    if sys.argv[1:2] == ["one"]:
        print(json.dumps((in_process if sys.argv[2] == "process" else in_simulation)(int(sys.argv[3]))))
    else:
        main()
