"""A plain Flower ServerApp with the lines of the tutorial: Method.start works without fedstill's own app."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from fedstill.common.config import RunConfig
from fedstill.common.config.files import load_run
from fedstill.deploy import flower_commands
from fedstill.deploy.launch import local
from tests.conftest import SMALL

TUTORIAL = Path(__file__).resolve().parents[2] / "docs/tutorials/python.md"


def test_the_tutorials_server_app_runs_in_flowers_simulation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [code] = [
        block for block in re.findall(r"```python\n(.*?)```", TUTORIAL.read_text(), re.S) if "ServerApp()" in block
    ]
    assert len([line for line in code.splitlines() if line.strip() and "import" not in line]) <= 10
    run, config = tmp_path / "mine", load_run(SMALL, ["rounds=1", "method.name=ds-fl", "method.distill_epochs=1",
                                                      "simulation.cpus=2", "report.alone=false"])  # fmt: skip
    (tmp_path / "run.toml").write_text(config.to_toml())
    code = code.replace("/srv/fl/run.toml", str(tmp_path / "run.toml")).replace("/srv/fl/runs/mine", str(run))
    plain = flower_commands.write_bundle

    def bundle(folder: Path, settings: RunConfig, run_folder: str, resume: bool) -> Path:
        made = plain(folder, settings, run_folder, resume)
        (made / "fedstill_run/server.py").write_text(code)
        return made

    monkeypatch.setattr(flower_commands, "write_bundle", bundle)
    monkeypatch.setattr(local, "_follow", lambda folder, processes, status, watch: wait(status))
    local.run_here(config, tmp_path / "here", "simulation", False, lambda event: None)
    summary = json.loads((run / "summary.json").read_text())
    assert summary["status"] == "finished"
    assert summary["method"] == "ds-fl"
    assert set(summary["sites"]) == {"north", "south"}


def wait(status: object) -> None:
    """Flower's own word on the run: this app writes no events of its start."""
    import time

    end = time.monotonic() + 300
    while not (said := status()).startswith("finished") and time.monotonic() < end:  # type: ignore[operator]
        time.sleep(1)
    assert said == "finished:completed"
