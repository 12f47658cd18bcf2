"""report.html: a run's report in one file that opens without a network, from what lies in the run's folder."""

from __future__ import annotations

import json
import os
import platform
import tomllib
from datetime import datetime
from pathlib import Path
from typing import Any

from fedstill import __version__
from fedstill.common.checkpoint import write_atomically
from fedstill.server.page import asset

FLEETING = ("progress", "asked", "traffic")  # a report needs none of these


def write_report(folder: Path) -> Path:
    """Write the report of a run, finished or not; return its path."""
    write_atomically(folder / "report.html", page(_facts(folder)))
    return folder / "report.html"


def page(facts: dict[str, Any]) -> str:
    """Return the page with everything in it; whatever a run says stays data."""
    scripts = "\n".join(asset(name) for name in ("charts.js", "story.js", "report.js"))
    data = json.dumps(facts).replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    parts = {"/*STYLE*/": asset("style.css"), "/*SCRIPTS*/": scripts, "/*DATA*/": data}
    text = asset("report.html")
    for mark, part in parts.items():
        before, after = text.split(mark)
        text = before + part + after
    return text


def _facts(folder: Path) -> dict[str, Any]:
    toml = (folder / "config.toml").read_text(encoding="utf-8")
    return {
        "run": folder.name,
        "toml": toml,
        "config": tomllib.loads(toml),
        "summary": _summary(folder),
        "events": list(_events(folder)),
        "written": f"{datetime.now().astimezone():%Y-%m-%d %H:%M %Z} by fedstill {__version__}",
        "machine": f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}, "
        f"Python {platform.python_version()}",
    }


def _summary(folder: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((folder / "summary.json").read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {"status": "unfinished", "reason": f"The run has not finished: fedstill resume {folder.name}"}


def _events(folder: Path) -> list[dict[str, Any]]:
    path, events = folder / "events.jsonl", []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            event = json.loads(line)
        except ValueError:
            continue  # a line that a full disk cut short
        if isinstance(event, dict) and event.get("event") not in FLEETING:
            events.append(event)
    return events
