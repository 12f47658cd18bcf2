"""The record of a run: one folder with its configuration, events, metrics, checkpoints, central model and summary."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedstill.common import checkpoint
from fedstill.common.checkpoint import Nested, append_line, write_atomically
from fedstill.common.config import RunConfig
from fedstill.common.models.text_model import TextModel
from fedstill.common.readable import reason_of
from fedstill.common.wire import Facts
from fedstill.server.page.report import write_report
from fedstill.server.tracking import Tracking, open_tracking

Watch = Callable[[dict[str, Any]], None]
PROGRESS_EVERY = 0.5  # seconds between two progress events
STOP = "stop"  # a file of this name in a run's folder asks it to stop after its round


class RecordError(RuntimeError):
    """The run's folder cannot be written; the text names it."""


class RunStopped(Exception):
    """Somebody asked the run to stop after its round, and it did; it can be resumed."""

    def __init__(self, number: int, run: str) -> None:
        super().__init__(f"stopped after round {number}, as asked; to go on: fedstill resume {run}")
        self.number = number


class Record:
    """Everything a run writes. `events.jsonl` is append-only; progress bars, reports and tests read it."""

    def __init__(self, folder: Path, config: RunConfig, watch: Watch | None = None) -> None:
        self.folder, self.config, self.watch = folder, config, watch
        with self._writing():
            folder.mkdir(parents=True, exist_ok=True)
            if not (folder / "config.toml").exists():
                write_atomically(folder / "config.toml", config.to_toml())
        self.checkpoints = folder / "checkpoints"
        self.tracking: Tracking | None = None
        self._progress_at = 0.0

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RecordError(
                f"{self.folder}: cannot be written ({error.strerror}); free some space or check the folder's "
                f"permissions, then go on with: fedstill resume {self.folder.name}"
            ) from None

    def note_rates(self, rates: Mapping[str, Mapping[str, float]]) -> None:
        """Write the rates that every model trains at below the settings in config.toml, as comments, once."""
        path, heading = self.folder / "config.toml", "# Rates as resolved: where nothing above sets one"
        with self._writing():
            text = path.read_text(encoding="utf-8")
            if heading not in text:
                lines = [
                    f"# {name}: learning {of['local']:g}, distillation {of['distil']:g}, "
                    f"interaction {of['interact']:g}, warm-up {of['warmup']:g}, fall {of['fall']:g}"
                    for name, of in rates.items()
                    if {"local", "distil", "interact", "warmup", "fall"} <= set(of)
                ]
                write_atomically(path, f"{text}\n{heading}, each model brings its own.\n" + "\n".join(lines) + "\n")

    def event(self, kind: str, **facts: object) -> None:
        """Append one line to events.jsonl."""
        line: dict[str, Any] = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "event": kind, **facts}
        with self._writing():
            append_line(self.folder / "events.jsonl", json.dumps(line))
        if self.watch is not None:
            self.watch(line)
        if self.tracking is not None:
            self.tracking.event(line)

    def progress(self, phase: str, done: int, total: int, **facts: object) -> None:
        """Record the progress of a phase; most calls are skipped, the last never."""
        now = time.monotonic()
        if done == total or now - self._progress_at > PROGRESS_EVERY:
            self._progress_at = now
            self.event("progress", phase=phase, done=done, total=total, **facts)

    def stop_wanted(self) -> bool:
        """Return whether somebody asked the run to stop after this round (`fedstill stop`, or the page)."""
        return (self.folder / STOP).exists()

    def metrics(self, rows: list[Facts]) -> None:
        """Rewrite metrics.csv from all rounds so far."""
        names = sorted({name for row in rows for name in row} - {"round", "node"})
        draft = self.folder / ".metrics.csv"
        with self._writing(), draft.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, ["round", "node", *names])
            writer.writeheader()
            writer.writerows(rows)
        draft.replace(self.folder / "metrics.csv")

    def save_round(self, number: int, arrays: Nested, facts: Facts) -> None:
        """Save the server's checkpoint of a round."""
        path = checkpoint.save(self.checkpoints, number, arrays, facts)
        self.event("checkpoint", round=number, path=str(path.relative_to(self.folder)))

    def summary(self, facts: Facts) -> None:
        """Write summary.json atomically."""
        with self._writing():
            write_atomically(self.folder / "summary.json", json.dumps(facts, indent=2) + "\n")

    def save_central(self, model: TextModel, card: str) -> None:
        """Save the central model as transformers loads it, with a model card."""
        folder = self.folder / "central"
        model.save(folder)
        (folder / "README.md").write_text(card, encoding="utf-8")


@contextlib.contextmanager
def recorded(config: RunConfig, folder: Path, resume: bool, watch: Watch | None = None) -> Iterator[Record]:
    """Record a run; if it fails, write the reason to its events and summary before raising."""
    record = Record(folder, config, watch)
    record.tracking = open_tracking(config, folder)
    (folder / STOP).unlink(missing_ok=True)
    record.event("run_started", run=folder.name, method=config.method.name, resume=resume, pid=os.getpid())
    try:
        yield record
    except RunStopped as stopped:
        record.event("run_stopped", round=stopped.number)
        record.summary({"status": "stopped", "reason": str(stopped), "method": config.method.name, "seed": config.seed})
        raise
    except BaseException as error:
        reason = reason_of(error)
        with contextlib.suppress(RecordError):  # of a full disk; the error itself says so
            record.event("run_failed", reason=reason)
            if not (folder / "summary.json").exists():
                facts = {"status": "failed", "reason": reason, "method": config.method.name, "seed": config.seed}
                record.summary(facts)
        raise
    finally:
        with contextlib.suppress(OSError):  # a full disk, or a Flower bundle, which carries no pages
            write_report(folder)
        if record.tracking is not None:
            record.tracking.close()
