"""A long federation of many short rounds in namespaces, to be disturbed again and again, and what must hold for it."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from .hosts import Hosts

RUN = """
name = "course"
rounds = 100000
[data]
private = 32
public = 16
labelled = 16
test = 16
[train]
learning_rate = 1e-3
max_length = 16
batch_size = 16
[method]
name = "ds-fl"
local_epochs = 1
distill_epochs = 1
[central]
model = "tiny-bert"
[[sites]]
name = "north"
[[sites]]
name = "east"
[report]
alone = false
centralized = false
evaluate = "end"
[exchange]
quorum = 0.5
reconnect = {reconnect}
keep_alive = 2
train_deadline = {deadline}
step_deadline = {deadline}
join_deadline = 180
"""


@dataclass
class Life:
    """One start of the ServerApp, as the events tell it."""

    resumed: int | None = None  # the round that it took up; None if it never came so far, or began anew
    began_anew: bool = False
    started: list[int] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)  # rounds whose checkpoint was written
    took_up: bool = False


class Course:
    """The run, from its first start through every resume."""

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        self.hosts, self.folder = hosts, folder
        self.command: subprocess.Popen[bytes] | None = None
        self.name = ""

    # --- starting ---

    def begin(self) -> None:
        """`fedstill run`; returns when the run has its folder."""
        self._launch("fedstill", "run", "/etc/fedstill/run.toml", "--on", "coordinator")
        self.wait(lambda: any(self._runs.glob("course-*/config.toml")), "a run")
        [folder] = self._runs.glob("course-*/config.toml")
        self.name = folder.parent.name

    def resume(self) -> None:
        """`fedstill resume`."""
        self._launch("fedstill", "resume", self.name)

    def _launch(self, *command: str) -> None:
        self.leave()
        self.command = self.hosts.coordinator.popen(*command, output=self.folder / "course.txt")

    def leave(self) -> None:
        """Stop looking at the run."""
        if self.command is not None:
            self.command.kill()
            self.command.wait(30)
            self.command = None

    def servers(self) -> list[psutil.Process]:
        """The processes of ServerApps: of the run, and of a resume that came too late for it."""
        return self.hosts.coordinator.processes("flwr-serverapp")

    def kill_server(self) -> None:
        """kill -9 of the ServerApp."""
        for process in self.servers():
            with contextlib.suppress(psutil.Error):
                process.kill()

    @property
    def _runs(self) -> Path:
        return self.hosts.coordinator.volume() / "runs"

    @property
    def run(self) -> Path:
        return self._runs / self.name

    # --- what happened ---

    def events(self, kind: str | None = None, since: int = 0, **facts: Any) -> list[dict[str, Any]]:
        """Events of a kind, from line `since` on."""
        with contextlib.suppress(OSError):
            lines = (self.run / "events.jsonl").read_text().splitlines(keepends=True)[since:]
            found = [json.loads(line) for line in lines if line.endswith("\n") and line.startswith("{")]
            found = [e for e in found if kind in (None, e["event"])]
            return [e for e in found if all(e.get(name) == value for name, value in facts.items())]
        return []

    def now(self) -> int:
        """How many events there are."""
        return len(self.events())

    def wait(self, condition: Callable[[], Any], what: str, seconds: float = 300) -> Any:
        """The condition's value once it is true."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if found := condition():
                return found
            time.sleep(0.25)
        raise AssertionError(f"no {what} within {seconds:.0f} s:\n{self.story()}")

    def wait_for(self, kind: str, since: int = 0, count: int = 1, seconds: float = 300, **facts: Any) -> dict[str, Any]:
        """The count-th event of a kind after `since`."""

        def found() -> list[dict[str, Any]]:
            events = self.events(kind, since, **facts)
            return events if len(events) >= count else []

        return dict(self.wait(found, f"{kind} {facts}", seconds)[count - 1])

    def story(self) -> str:
        """The last events and logs, for a person."""
        kept = [e for e in self.events() if e["event"] not in ("progress", "checkpoint")][-25:]
        said = [str({k: v for k, v in e.items() if k != "sites"})[:300] for e in kept]
        output = self.folder / "course.txt"
        said += [output.read_text(errors="replace")[-1500:] if output.exists() else ""]
        for host in self.hosts.hosts.values():
            lines = [line for line in host.log(400).splitlines() if "uvicorn.access" not in line]
            said += [f"--- {host.name} (started again {host.restarts} times)", *lines[-25:]]
        return "\n".join(said)

    def lives(self) -> list[Life]:
        """What each start of the ServerApp took up and did."""
        found: list[Life] = []
        for event in self.events():
            kind = event["event"]
            if kind == "run_started":
                found.append(Life())
            elif kind == "resumed":
                found[-1].took_up = True
                found[-1].resumed, found[-1].began_anew = event["round"], event["round"] is None
            elif kind == "round_started":
                found[-1].started.append(event["round"])
            elif kind == "checkpoint":
                found[-1].kept.append(event["round"])
        return found

    def check(self) -> tuple[int, int]:
        """No completed round is lost, at most one a resume is repeated; how often it was resumed, rounds repeated."""
        lives = self.lives()
        done, begun, repeated, resumes = -1, -1, 0, 0
        for life in lives:
            if life.took_up:
                resumes += 1
                assert not life.began_anew or done < 0, f"began anew after round {done}:\n{self.story()}"
                taken = -1 if life.resumed is None else life.resumed
                assert taken >= done, f"round {done} was completed, and round {taken} taken up:\n{self.story()}"
                again = max(0, begun - taken) if taken >= 0 else 0
                assert again <= 1, f"{again} rounds are repeated:\n{self.story()}"
                repeated += again
            if life.started:
                steps = [b - a for a, b in zip(life.started, life.started[1:], strict=False)]
                assert all(step == 1 for step in steps), life.started
            begun = max([begun, *life.started])
            done = max([done, *life.kept])
        return resumes, repeated

    def ledger(self, site: str) -> list[dict[str, Any]]:
        """What left a site."""
        path = self.hosts.sites[site].volume() / f"state/{site}/ledger.jsonl"
        lines = path.read_text().splitlines()
        return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]

    def answered_twice(self, site: str) -> list[tuple[Any, ...]]:
        """Steps for which one session of a site worked out more than one answer."""
        found: list[tuple[Any, ...]] = []
        session: Counter[tuple[Any, ...]] = Counter()
        for line in self.ledger(site):
            if line["verb"] == "join":
                found += [place for place, count in session.items() if count > 1]
                session = Counter()
            elif "refused" not in line:
                session[line["verb"], line["round"], line["step"]] += 1
        return found + [place for place, count in session.items() if count > 1]

    def finish(self, rounds: int) -> dict[str, Any]:
        """Shorten the run to `rounds` more than are done, resume it, and wait for its end; its summary."""
        done = max(number for life in self.lives() for number in life.kept)
        config = self.run / "config.toml"
        config.write_text(re.sub(r"(?m)^rounds = \d+$", f"rounds = {done + rounds}", config.read_text()))
        since = self.now()
        self.resume()
        self.wait_for("run_finished", since)
        assert self.command is not None
        assert self.command.wait(60) == 0, self.story()
        return dict(json.loads((self.run / "summary.json").read_text()))
