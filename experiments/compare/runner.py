"""Running a table: every row with every seed, in processes of their own; finished runs are kept.

A run has a process to itself, unless it is a matter of seconds (all models frozen): these share one, since importing
torch would take longer than they do.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Literal, Protocol

from fedstill.common.checkpoint import write_atomically
from fedstill.common.config import ConfigError, RunConfig
from fedstill.common.config.files import load_run
from fedstill.common.lock import only_one
from fedstill.deploy.flower_commands import environment
from fedstill.deploy.launch.checks import check_run
from fedstill.deploy.processes import Processes
from fedstill.experiments.compare.published import key_of
from fedstill.experiments.compare.tables import Table, check_tasks
from fedstill.experiments.compare.worker import CONFIG, DONE, FAILED, SUMMARY, can_resume

On = Literal["process", "local", "simulation"]
State = Literal["finished", "failed", "changed", "half", "resumable", "new"]
CHUNK = 30  # quick runs that share a process
WHAT_HAPPENS = {  # to an unfinished run, printed before it starts
    "failed": "failed last time, begun anew",
    "changed": "its configuration changed, begun anew",
    "half": "its folder was half written, begun anew",
    "resumable": "taken up at its last checkpoint",
}


@dataclass
class Run:
    """One row with one seed, and its folder."""

    row: str
    seed: int
    config: RunConfig
    folder: Path
    began: float = 0.0
    round: int | None = None
    read: int = 0  # bytes of its events read so far
    worker: str = ""  # the process that runs it

    @property
    def quick(self) -> bool:
        """Whether it trains heads on cached features only."""
        return all(model.freeze == "encoder" for model in [self.config.central, *self.config.sites])

    @property
    def name(self) -> str:
        """The run's name as shown."""
        return f"{self.row}, seed {self.seed}"


class Watch(Protocol):
    """Receives the progress of the runs."""

    def says(self, text: str) -> None: ...
    def moves(self, progress: Progress) -> None: ...


@dataclass
class Progress:
    """How far a table is."""

    total: int
    jobs: int
    done: int = 0
    running: list[Run] = field(default_factory=list)
    waiting: list[Run] = field(default_factory=list)
    took: dict[str, list[float]] = field(default_factory=dict)  # seconds of finished runs, by row

    def left(self) -> float | None:
        """Estimate the remaining seconds from finished runs; None before there is one."""
        seconds_taken = [seconds for of_row in self.took.values() for seconds in of_row]
        if not seconds_taken:
            return None
        by_row = {row: sum(of_row) / len(of_row) for row, of_row in self.took.items()}
        mean = sum(seconds_taken) / len(seconds_taken)
        now = time.monotonic()
        rest = sum(by_row.get(run.row, mean) for run in self.waiting)
        rest += sum(max(0.0, by_row.get(run.row, mean) - (now - run.began)) for run in self.running)
        longest = max((by_row.get(run.row, mean) for run in self.waiting), default=0.0)
        return max(rest / self.jobs, longest)


def run_table(
    table: Table,
    out: Path,
    on: On,
    jobs: int,
    watch: Watch,
    rows: str = "*",
    keep_models: bool = False,
    reuse: Path | None = None,
    published: Collection[str] = (),
) -> list[Run]:
    """Run what is neither finished nor published; return the runs that failed. Ending early ends the workers too."""
    wanted = [row for row in table.rows if fnmatch(row, rows)]
    if not wanted:
        raise ConfigError(f"--rows {rows}: no row of {table.source()} is called so; rows: {', '.join(table.rows)}")
    for row in wanted:
        try:
            check_run(table.rows[row], "local" if on == "process" else on)
        except ConfigError as error:
            raise ConfigError(f"{table.source(row)}:\n  {error}") from None
    busy = f"{out}: another `fedstill compare` runs this table now; wait for it, or give --runs another folder"
    with only_one(out / ".lock", ConfigError(busy)):
        runs = [
            Run(row, seed, table.config(row, seed), run_folder(out, row, seed))
            for seed in table.settings.seeds
            for row in wanted
        ]
        progress = Progress(len(runs), jobs)
        for run in runs:
            if (state := state_of(run)) != "finished" and reuse and (twin := finished_twin(run, out.parent)):
                _take_over(run, twin)
                watch.says(
                    f"{run.name}: taken from {twin.parent.parent.name}, {twin.parent.name}, which is the same run"
                )
                state = state_of(run)
            if state == "finished":
                progress.done += 1
                progress.took.setdefault(run.row, []).append(_seconds(run))
            elif published and key_of(run.config) in published:
                progress.done += 1
            else:
                progress.waiting.append(run)
                if state in WHAT_HAPPENS:
                    watch.says(f"{run.name}: {WHAT_HAPPENS[state]}")
        if progress.done:
            watch.says(f"{progress.done} of {progress.total} runs are there already")
        if not progress.waiting:
            return []
        check_tasks(table)
        options = [*(["--keep-models"] if keep_models else []), *(["--reuse", str(reuse.resolve())] if reuse else [])]
        return _work(progress, out, on, watch, options)


def run_folder(out: Path, row: str, seed: int) -> Path:
    """Return the folder in which a run is recorded."""
    return out / row / f"seed-{seed}"


def state_of(run: Run) -> State:
    """Return the state of this run by what its folder holds."""
    if not run.folder.exists():
        return "new"
    try:
        recorded = load_run(run.folder / CONFIG)
    except ValueError:
        return "half"
    if recorded != run.config:
        return "changed"
    if (run.folder / FAILED).exists():
        return "failed"
    if (run.folder / DONE).exists() and read_json(run.folder / SUMMARY).get("status") == "finished":
        return "finished"
    return "resumable" if can_resume(run.config, run.folder) else "half"


def finished_twin(run: Run, tables: Path) -> Path | None:
    """Return another table's folder of a finished run that differs in its name alone."""
    for done in sorted(tables.glob(f"*/*/seed-{run.seed}/{DONE}")):
        if done.parent == run.folder:
            continue
        with contextlib.suppress(ValueError):
            twin = load_run(done.parent / CONFIG)
            if twin.model_copy(update={"name": run.config.name}) == run.config and (
                read_json(done.parent / SUMMARY).get("status") == "finished"
            ):
                return done.parent
    return None


def _take_over(run: Run, twin: Path) -> None:
    shutil.rmtree(run.folder, ignore_errors=True)
    draft = run.folder.with_name(f".{run.folder.name}")
    shutil.rmtree(draft, ignore_errors=True)
    shutil.copytree(twin, draft)
    write_atomically(draft / CONFIG, run.config.to_toml())
    draft.replace(run.folder)


def read_json(path: Path) -> dict[str, Any]:
    """Read a small JSON file of a run; empty where it is absent or unreadable."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}


def _work(progress: Progress, out: Path, on: On, watch: Watch, options: list[str]) -> list[Run]:
    failed: list[Run] = []
    env = {**environment(), "OMP_NUM_THREADS": "1"}
    with Processes(out / "logs", env) as processes:
        try:
            while progress.waiting or progress.running:
                while progress.waiting and len(processes.running) < progress.jobs:
                    _start(processes, progress, on, options)
                died: set[str] = set()
                for run in list(progress.running):
                    process = processes.running.get(run.worker)
                    code = None if process is None else process.poll()
                    _look(run)
                    if code is None and process is not None and not _ended(run):
                        continue
                    progress.running.remove(run)
                    if not _ended(run) and run.worker in died:  # its worker died on a run before it
                        progress.waiting.insert(0, run)
                        continue
                    if not _ended(run):
                        died.add(run.worker)
                    progress.done += 1
                    if state_of(run) == "finished":
                        progress.took.setdefault(run.row, []).append(_seconds(run))
                        watch.says(f"{run.name}: finished in {_seconds(run):.0f} s")
                    else:
                        failed.append(run)
                        watch.says(f"{run.name}: failed: {_reason(run, code or 0, processes)}")
                for name in [name for name, process in processes.running.items() if process.poll() is not None]:
                    if not any(run.worker == name for run in progress.running):
                        del processes.running[name]
                watch.moves(progress)
                time.sleep(0.2)
        except BaseException:
            processes.end()
            raise
    return failed


def _start(processes: Processes, progress: Progress, on: On, options: list[str]) -> None:
    """Start a worker on the next run, or on the next quick ones."""
    chunk = [progress.waiting.pop(0)]
    while on == "process" and chunk[-1].quick and progress.waiting and progress.waiting[0].quick and len(chunk) < CHUNK:
        chunk.append(progress.waiting.pop(0))
    for run in chunk:
        if state_of(run) != "resumable":
            shutil.rmtree(run.folder, ignore_errors=True)
        run.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(run.folder / CONFIG, run.config.to_toml())
        for file in (SUMMARY, DONE, FAILED):
            (run.folder / file).unlink(missing_ok=True)
        events = run.folder / "events.jsonl"
        run.read = events.stat().st_size if events.exists() else 0
        run.worker, run.began = f"{chunk[0].row}-seed-{chunk[0].seed}", time.monotonic()
        progress.running.append(run)
    folders = [str(run.folder.resolve()) for run in chunk]
    command = [sys.executable, "-m", "fedstill.experiments.compare.worker", on, *folders]
    processes.start(chunk[0].worker, [*command, *options])


def _ended(run: Run) -> bool:
    return (run.folder / DONE).exists() or (run.folder / FAILED).exists()


def _look(run: Run) -> None:
    """Update a run's round from the complete lines that were added to its events."""
    with contextlib.suppress(OSError), (run.folder / "events.jsonl").open("rb") as file:
        file.seek(run.read)
        text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        run.read += len(whole)
        for line in whole.splitlines():
            if b'"round_started"' in line:
                run.round = int(json.loads(line)["round"])


def _reason(run: Run, code: int, processes: Processes) -> str:
    """Return why a run failed; a worker that was killed could not write it down itself."""
    if not (run.folder / FAILED).exists():
        ending = f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"
        error = f"the worker {ending}; the end of its log:\n{processes.tail(run.worker)}"
        write_atomically(run.folder / FAILED, json.dumps({"error": error}, indent=1) + "\n")
    return str(read_json(run.folder / FAILED).get("error", "failed.json cannot be read"))


def _seconds(run: Run) -> float:
    return float(read_json(run.folder / DONE).get("seconds", 0.0))


def default_jobs(on: On) -> int:
    """Return all cores where each run is one process; a federation of processes runs alone."""
    return (os.cpu_count() or 1) if on == "process" else 1
