"""Runs on disk: where a new one goes, which is the latest, and their summaries."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from fedstill.common.readable import main_score


def point_latest(folder: Path) -> None:
    link, draft = folder.parent / "latest", folder.parent / f".latest-{os.getpid()}"
    draft.unlink(missing_ok=True)
    draft.symlink_to(folder.name)
    draft.replace(link)


def all_runs(runs: Path) -> list[Path]:
    if not runs.is_dir():
        return []
    folders = [entry for entry in runs.iterdir() if not entry.is_symlink() and (entry / "config.toml").is_file()]
    return sorted(folders, key=lambda entry: entry.stat().st_mtime)


def find_run(runs: Path, name: str) -> Path:
    for folder in (runs / name, Path(name)):
        if (folder / "config.toml").is_file():
            return folder.resolve()
    known = ", ".join(folder.name for folder in all_runs(runs)[-5:]) or "none"
    raise ValueError(f"there is no run {name!r} in {runs.resolve()}; the newest runs there: {known}")


def summary_of(folder: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((folder / "summary.json").read_text()))
    except (OSError, ValueError):
        return {"status": "unfinished", "reason": f"to go on: fedstill resume {folder.name}"}


def row_of(folder: Path) -> dict[str, Any]:
    summary = summary_of(folder)
    central, seconds = summary.get("central") or {}, summary.get("seconds") or {}
    return {
        "run": folder.name,
        "status": summary["status"],
        "method": summary.get("method"),
        "rounds": summary.get("rounds"),
        "score": main_score(central) if central else None,
        "central": central.get(main_score(central)),
        "seconds": seconds.get("total"),
    }
