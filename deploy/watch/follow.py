"""A run's folder as a page follows it: the events written so far, new ones as they come, and what may be done."""

from __future__ import annotations

import asyncio
import json
import threading
import time
import tomllib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from fedstill.deploy.processes import alive
from fedstill.server.record import STOP

FLEETING = ("progress", "asked", "traffic")  # of these only the last one matters to somebody who comes later
OVER = ("run_finished", "run_stopped", "run_failed")
POLL = 0.3
SILENT = 60.0  # seconds without an event after which a run whose process is not here counts as interrupted


@dataclass
class Folder:
    """One run's folder."""

    path: Path
    steer: bool = True  # whether the page may stop and resume it
    started: float = 0.0  # when the page resumed it
    _at: int = 0  # how far `facts` has read
    _last: dict[str, Any] | None = None  # the last event
    _pid: int | None = None  # of the server, by the last start
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def read(self, start: int) -> tuple[list[tuple[int, dict[str, Any]]], int]:
        """Return whole events from byte `start` on, each with the byte after it, and that of the last one."""
        try:
            with (self.path / "events.jsonl").open("rb") as file:
                file.seek(start)
                text = file.read()
        except OSError:
            return [], start
        events, at = [], start
        for line in text.splitlines(keepends=True):
            if not line.endswith(b"\n"):
                break
            at += len(line)
            try:
                event = json.loads(line)
            except ValueError:
                continue  # a line that a full disk cut short
            if isinstance(event, dict) and "event" in event and "time" in event:
                events.append((at, event))
        return events, at

    def facts(self) -> dict[str, Any]:
        """Return what is not in the events: configuration, forecast, and what may be done now."""
        with self._lock:
            events, self._at = self.read(self._at)
            for _, event in events:
                self._pid = event["pid"] if event["event"] == "run_started" else self._pid
                self._last = event
        over = self._last is None or self._last["event"] in OVER
        gone = self._last is not None and not over and not self._runs(self._last)
        return {
            "run": self.path.name,
            "config": self._config(),
            "forecast": self._json("forecast.json"),
            "over": over or gone,
            "starting": time.time() - self.started < 60 and (over or gone),
            "stopping": (self.path / STOP).exists() and not (over or gone),
            "resumable": (self.path / "launch.json").is_file() and (over or gone),
            "steer": self.steer,
        }

    def _config(self) -> dict[str, Any]:
        try:
            config = tomllib.loads((self.path / "config.toml").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        sites = [{"name": site.get("name"), "model": site.get("model")} for site in config.get("sites", [])]
        exchange = {"sites": config.get("exchange", {}).get("sites")}
        central = {"model": config.get("central", {}).get("model")}
        return {"rounds": config.get("rounds"), "sites": sites, "central": central, "exchange": exchange}

    def _json(self, name: str) -> Any:
        try:
            return json.loads((self.path / name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None

    def _runs(self, last: dict[str, Any]) -> bool:
        """Whether a run that has not ended still runs: its process is here, or (elsewhere) it spoke a while ago."""
        try:
            silent = time.time() - datetime.fromisoformat(last["time"]).timestamp()
        except (TypeError, ValueError):
            silent = SILENT
        return (self._pid is not None and alive(self._pid)) or silent < (5 if self._local() else SILENT)

    def _local(self) -> bool:
        launch = self._json("launch.json")
        return isinstance(launch, dict) and launch.get("on") in ("local", "process", "simulation")


async def stream(folder: Folder, start: int) -> AsyncIterator[str]:
    """Yield server-sent events: first the story so far, then each event as it is written."""
    facts, at = await asyncio.to_thread(folder.facts), start
    yield _frame("facts", {**facts, "fresh": start == 0})
    beat = time.monotonic()
    while True:
        events, after = await asyncio.to_thread(folder.read, at)
        if at == 0:
            last = {event["event"]: place for place, event in events}
            events = [(p, e) for p, e in events if e["event"] not in FLEETING or last[e["event"]] == p]
        for place, event in events:
            yield _frame("run", event, place)
        moved, at = bool(events), after
        if moved or time.monotonic() - beat > 2:
            beat = time.monotonic()
            now = await asyncio.to_thread(folder.facts)
            if now != facts:
                facts = now
                yield _frame("facts", {**facts, "fresh": False})
            else:
                yield ": still here\n\n"  # a browser that left is noticed only on writing
        await asyncio.sleep(POLL)


def _frame(kind: str, data: dict[str, Any], place: int | None = None) -> str:
    number = "" if place is None else f"id: {place}\n"
    return f"{number}event: {kind}\ndata: {json.dumps(data)}\n\n"
