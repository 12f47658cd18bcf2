"""The command line around a run: Flower's own command, failures with their reasons, interruption, looking around."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fedstill.deploy import flower_commands as flower
from fedstill.deploy.processes import Processes, free_port

from .conftest import COMMAND, Running, nobody_left

Start = Callable[..., Running]
ROOT = Path(__file__).resolve().parents[2]
NAME = "coordinator"


def start_superlink_and_nodes(processes: Processes, home: Path, nodes: int) -> None:
    """A federation by Flower's own commands, and the connection to it under its name."""
    port, fleet = free_port(), free_port()
    flower.write_connection(home, NAME, {"address": f"127.0.0.1:{port}", "insecure": True})
    command = ["flower-superlink", "--insecure", "--disable-runtime-dependency-installation", "--host", "127.0.0.1"]
    processes.start("superlink", [*command, "--port", str(port), "--fleet-api-address", f"127.0.0.1:{fleet}"])
    processes.wait_for_port("superlink", fleet, 60)
    for number in range(nodes):
        command = ["flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{fleet}", "--host", "127.0.0.1"]
        where = ["--port", str(free_port()), "--node-config", f"partition-id={number}"]
        processes.start(f"site-{number}", [*command, *where])


def test_plain_flwr_run_works_on_a_connection_by_name(tmp_path: Path, small_file: Path) -> None:
    """`flwr run . NAME`, as somebody does who knows Flower and not fedstill."""
    home, runs = tmp_path / "flower", tmp_path / "runs"
    env = flower.environment(home)
    env.update(FEDSTILL_STATE=str(tmp_path / "sites"), FEDSTILL_RUNS=str(runs), OMP_NUM_THREADS="1")
    with Processes(tmp_path / "logs", env) as processes:
        start_superlink_and_nodes(processes, home, nodes=2)
        settings = f'config="{small_file}" run-folder="by-hand"'
        done = subprocess.run(
            ["flwr", "run", ".", NAME, "--run-config", settings, "--stream"],
            cwd=ROOT, env=env, capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((runs / "by-hand/summary.json").read_text())
    assert summary["status"] == "finished"
    assert np.isfinite(summary["central"]["accuracy"])


def test_a_run_that_fails_exits_with_1_and_the_reason(fedstill: Start, small_file: Path) -> None:
    running = fedstill("run", str(small_file), "--set", "sites.south.model=/nowhere/model")
    assert running.finish() == 1
    output = running.output()
    assert "fedstill: site south: model folder /nowhere/model: is not there; check the path (" in output
    assert "<class" not in output
    assert "south" in output[output.index("not joined: ") :]
    assert running.summary()["status"] == "failed"
    assert nobody_left(running.folder)


def test_a_site_that_never_comes_is_named_after_the_deadline(tmp_path: Path, small_file: Path) -> None:
    """Two sites in the run, one SuperNode started."""
    home, runs = tmp_path / "flower", tmp_path / "runs"
    env = flower.environment(home)
    env.update(FEDSTILL_STATE=str(tmp_path / "sites"), FEDSTILL_RUNS=str(runs), OMP_NUM_THREADS="1")
    with Processes(tmp_path / "logs", env) as processes:
        start_superlink_and_nodes(processes, home, nodes=1)
        done = subprocess.run(
            [COMMAND, "run", str(small_file), "--on", NAME, "--set", "exchange.join_deadline=25"],
            cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200, check=False,
        )  # fmt: skip
        assert done.returncode == 1
        assert "finished:failed" in done.stderr
    [folder] = [entry for entry in runs.iterdir() if not entry.is_symlink() and (entry / "summary.json").is_file()]
    assert (runs / "latest").resolve() == folder.resolve()
    reason = json.loads((folder / "summary.json").read_text())["reason"]
    assert "1 of 2 sites joined" in reason
    assert "not joined: south" in reason
    assert "1 SuperNodes are connected" in reason


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_everything_and_says_how_to_go_on(fedstill: Start, small_file: Path, number: int) -> None:
    running = fedstill("run", str(small_file), "--set", "rounds=50")
    running.wait_for("round_started")
    os.kill(running.process.pid, number)
    assert running.finish(60) == 130
    assert f"To go on: fedstill resume {running.run.name}" in running.output()
    assert nobody_left(running.folder)


def test_commands_that_only_look_answer_in_json() -> None:
    for command, key in (("methods", "fedid"), ("models", "tiny-t5"), ("tasks", "film-reviews")):
        done = subprocess.run([COMMAND, command, "--json"], capture_output=True, text=True, check=True)
        assert key in {row["name"] for row in json.loads(done.stdout)}
    done = subprocess.run([COMMAND, "show", "nothing"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "there is no run 'nothing'" in done.stderr
    assert "Traceback" not in done.stderr
