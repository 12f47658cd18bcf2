"""Real `fedstill`, `flower-superlink` and `flower-supernode` processes on free loopback ports."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

COMMAND = str(Path(sys.executable).parent / "fedstill")


class Running:
    """A `fedstill` command at work in a runs folder of its own."""

    def __init__(self, folder: Path, arguments: list[str]) -> None:
        self.folder = folder
        self.log = (folder / "output.txt").open("ab+")
        if arguments[0] == "run":  # tests/unit/deploy/test_examination.py has the check
            arguments = [*arguments, "--no-check"]
        self.process = subprocess.Popen([COMMAND, *arguments], cwd=folder, stdout=self.log, stderr=subprocess.STDOUT)

    @property
    def run(self) -> Path:
        return (self.folder / "runs/latest").resolve()

    def output(self) -> str:
        return (self.folder / "output.txt").read_text(errors="replace")

    def events(self, kind: str | None = None) -> list[dict[str, Any]]:
        with contextlib.suppress(OSError):
            lines = (self.run / "events.jsonl").read_text().splitlines(keepends=True)
            events = [json.loads(line) for line in lines if line.endswith("\n")]
            return [event for event in events if kind in (None, event["event"])]
        return []

    def wait_for(self, kind: str, count: int = 1, seconds: float = 300, **facts: Any) -> dict[str, Any]:
        """The count-th event of a kind, once it has happened."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            found = [e for e in self.events(kind) if all(e.get(k) == v for k, v in facts.items())]
            if len(found) >= count:
                return found[count - 1]
            assert self.process.poll() is None, f"ended before {kind}:\n{self.output()}"
            time.sleep(0.05)
        raise AssertionError(f"no {kind} within {seconds} s:\n{self.output()}")

    def finish(self, seconds: float = 300) -> int:
        code = self.process.wait(timeout=seconds)
        self.log.close()
        return code

    def summary(self) -> dict[str, Any]:
        return dict(json.loads((self.run / "summary.json").read_text()))


def family(folder: Path) -> list[psutil.Process]:
    """Every process that belongs to a run in `folder`, by its environment."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if str(folder) in process.environ().get("FLWR_HOME", "") and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def nobody_left(folder: Path, seconds: float = 10) -> bool:
    """Whether every process of the runs in `folder` ends within a few seconds."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if not family(folder):
            return True
        time.sleep(0.1)
    return False


@pytest.fixture
def fedstill(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    """Start a `fedstill` command; whatever a test leaves behind is ended after it."""
    started: list[Running] = []

    def start(*arguments: str) -> Running:
        started.append(Running(tmp_path, list(arguments)))
        return started[-1]

    yield start
    for running in started:
        if running.process.poll() is None:
            running.process.kill()
            running.process.wait()
    for process in family(tmp_path):
        with contextlib.suppress(psutil.Error):
            os.kill(process.pid, 9)
