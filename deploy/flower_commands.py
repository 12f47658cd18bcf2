"""Flower's commands as fedstill calls them: the app bundle, connections, starting a run, querying its status."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w

from fedstill import __version__
from fedstill.common.config import RunConfig

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}


THIN = {  # the files of an app bundle; a site runs no others
    "fedstill_run/__init__.py": '"""A run of fedstill, as a Flower app."""\n',
    "fedstill_run/server.py": "from fedstill.server import app as room\n\napp = room.app\n",
    "fedstill_run/client.py": "from fedstill.client import app as room\n\napp = room.app\n",
}


class FlowerError(RuntimeError):
    """A Flower command failed; the text is its output."""


def environment(home: Path | None = None) -> dict[str, str]:
    """Return this process's environment with Flower silenced and this interpreter's commands first on PATH."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    env = {**os.environ, **QUIET, "PATH": path}
    return env if home is None else {**env, "FLWR_HOME": str(home)}


def write_bundle(folder: Path, config: RunConfig, run_folder: str, resume: bool) -> Path:
    """Write a Flower app of two thin files, so that every party runs its own installed fedstill."""
    for name, text in THIN.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    project: dict[str, Any] = {
        "project": {
            "name": "fedstill-run",
            "version": __version__,
            "description": "A run of fedstill",
            "license": "Apache-2.0",
            "dependencies": [],
        },
        "tool": {
            "flwr": {
                "app": {
                    "publisher": "fedstill",
                    "fab-include": ["fedstill_run/*.py"],
                    "components": {"serverapp": "fedstill_run.server:app", "clientapp": "fedstill_run.client:app"},
                    "config": {"config": config.to_json(), "run-folder": run_folder, "resume": resume},
                }
            }
        },
    }
    (folder / "pyproject.toml").write_text(tomli_w.dumps(project))
    return folder


def write_connection(home: Path, name: str, connection: Mapping[str, Any]) -> None:
    """Write Flower's config.toml with one SuperLink connection."""
    home.mkdir(parents=True, exist_ok=True)
    (home / "config.toml").write_text(tomli_w.dumps({"superlink": {"default": name, name: dict(connection)}}))


def add_connection(home: Path, name: str, connection: Mapping[str, Any]) -> None:
    """Add a SuperLink connection to Flower's config.toml; the others stay as they are."""
    home.mkdir(parents=True, exist_ok=True)
    path = home / "config.toml"
    known = tomllib.loads(path.read_text()) if path.exists() else {}
    links = {"default": name, **known.get("superlink", {}), name: dict(connection)}
    path.write_text(tomli_w.dumps({**known, "superlink": links}))


def start_run(bundle: Path, connection: str, env: Mapping[str, str], simulation: Mapping[str, Any]) -> int:
    """Run `flwr run` to submit the bundle to a SuperLink; return the run's number."""
    settings = " ".join(f"{name}={value}" for name, value in simulation.items())
    options = ["--federation-config", settings] if settings else []
    answer = _flwr(["run", str(bundle), connection, *options, "--format", "json"], env)
    if not answer.get("success", True) or "run-id" not in answer:
        message = " ".join(str(answer.get("error-message", answer)).split())
        raise FlowerError(f"flwr run {connection}: {message}")
    return int(answer["run-id"])


def run_status(run_id: int, connection: str, env: Mapping[str, str]) -> str:
    """Return the run's status by `flwr list`, such as `running` or `finished:completed`."""
    answer = _flwr(["list", connection, "--run-id", str(run_id), "--format", "json"], env)
    runs = answer.get("runs") or []
    return str(runs[0]["status"]) if runs else "unknown"


def call(arguments: list[str], env: Mapping[str, str]) -> dict[str, Any]:
    """Run a `flwr` command that answers in JSON; its error message becomes the exception."""
    answer = _flwr(arguments, env)
    if not answer.get("success", True):
        message = " ".join(str(answer.get("error-message", answer)).split())
        raise FlowerError(f"flwr {' '.join(arguments[:2])}: {message}")
    return answer


def _flwr(arguments: list[str], env: Mapping[str, str]) -> dict[str, Any]:
    done = subprocess.run(["flwr", *arguments], env=dict(env), capture_output=True, text=True, timeout=120, check=False)
    start = done.stdout.find("{")
    try:
        return dict(json.loads(done.stdout[start:]))
    except ValueError:
        output = (done.stdout + done.stderr).strip()[-2000:]
        raise FlowerError(f"flwr {' '.join(arguments[:1])} failed (exit code {done.returncode}):\n{output}") from None
