"""Whole runs by the command line: they end with the weights that the same method has in one process."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from fedstill.common import checkpoint
from fedstill.common.config import RunConfig
from fedstill.deploy import flower
from fedstill.deploy.processes import Processes, free_port
from tests.conftest import without_times
from tests.federation.conftest import Federation

from .conftest import COMMAND, Running, nobody_left

Start = Callable[..., Running]
ROOT = Path(__file__).resolve().parents[2]
NAME = "coordinator"


def weights_of(run: Path) -> str:
    """A hash over the central model's and every site's weights as their last checkpoints have them."""
    digest = hashlib.sha256()
    central, _ = checkpoint.load(run / "checkpoints", checkpoint.rounds(run / "checkpoints")[-1])
    states = [{n.removeprefix("central/"): v for n, v in central.items()}]
    for site in ("north", "south"):
        folder = run / "sites" / site / run.name / "checkpoints"
        states.append(checkpoint.load(folder, checkpoint.rounds(folder)[-1])[0])
    for state in states:
        for name, value in sorted(state.items()):
            if name.startswith("model/"):
                digest.update(name.removeprefix("model/").encode() + value.tobytes())
    return digest.hexdigest()


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Callable[[RunConfig], tuple[str, dict[str, object]]]:
    """What the same run gives in one process, without Flower."""
    known: dict[str, tuple[str, dict[str, object]]] = {}

    def run(config: RunConfig) -> tuple[str, dict[str, object]]:
        key = config.to_json()
        if key not in known:
            made = Federation(config, tmp_path_factory.mktemp("plain"))
            known[key] = (made.run(), made.weights())[::-1]  # type: ignore[assignment]
        return known[key]

    return run


def test_real_processes_end_with_the_very_same_weights(
    fedstill: Start, small: Callable[..., RunConfig], small_file: Path, expected: Callable[..., tuple[str, dict]]
) -> None:
    running = fedstill("run", str(small_file))
    assert running.finish() == 0, running.output()
    weights, summary = expected(small())
    assert weights_of(running.run) == weights
    found = running.summary()
    assert without_times(found) == without_times(summary)
    assert nobody_left(running.folder)
    check_folder(running, found)


def check_folder(running: Running, summary: dict) -> None:
    """One folder with everything in it, and a table on the screen."""
    assert {"status", "method", "preset", "seed", "central", "sites", "centralized", "seconds"} <= set(summary)
    assert set(summary["seconds"]) == {"total", "compute", "exchange", "set-up"}
    assert {"family", "alone", "after", "bytes_up", "bytes_down"} <= set(summary["sites"]["north"])
    assert summary["sites"]["south"]["family"] == "roberta"
    run = running.run
    assert tomllib.loads((run / "config.toml").read_text())["sites"][1]["name"] == "south"
    lines = (run / "metrics.csv").read_text().splitlines()
    assert lines[0] == "round,node,accuracy"
    assert len(lines) == 1 + 3 * 3  # rounds 0, 1 and 2 of central, north and south
    model = AutoModelForSequenceClassification.from_pretrained(run / "central")
    assert model.config.id2label == {0: "negative", 1: "positive"}
    assert AutoTokenizer.from_pretrained(run / "central")("fine").input_ids
    card = (run / "central/README.md").read_text()
    assert "| south | roberta |" in card
    output = running.output()
    assert "mean of sites" in output
    assert "centralized" in output
    assert str(run.name) in output
    shown = subprocess.run(
        [COMMAND, "show", "latest", "--json"], cwd=running.folder, capture_output=True, text=True, check=True
    )
    assert json.loads(shown.stdout) == summary
    listed = subprocess.run([COMMAND, "runs", "--json"], cwd=running.folder, capture_output=True, text=True, check=True)
    assert json.loads(listed.stdout)[0]["status"] == "finished"


def test_with_tls_the_weights_are_the_same(
    fedstill: Start, small: Callable[..., RunConfig], small_file: Path, expected: Callable[..., tuple[str, dict]]
) -> None:
    running = fedstill("run", str(small_file), "--tls")
    assert running.finish() == 0, running.output()
    assert weights_of(running.run) == expected(small())[0]
    assert oct((running.run / "certificates/server.key").stat().st_mode)[-3:] == "600"


def test_plain_flower_messages_give_the_same_weights(
    fedstill: Start, small: Callable[..., RunConfig], small_file: Path, expected: Callable[..., tuple[str, dict]]
) -> None:
    changes = ("exchange.link=messages", "rounds=1", "data.public=16", "method.distill_epochs=1", "report.alone=false",
               "report.evaluate=end")  # fmt: skip
    options = [option for change in changes for option in ("--set", change)]
    running = fedstill("run", str(small_file), *options)
    assert running.finish(600) == 0, running.output()
    stream = [change.replace("=messages", "=stream") for change in changes]
    assert weights_of(running.run) == expected(small(*stream))[0]


def test_the_simulation_gives_the_same_weights(
    fedstill: Start, small: Callable[..., RunConfig], small_file: Path, expected: Callable[..., tuple[str, dict]]
) -> None:
    running = fedstill("run", str(small_file), "--on", "simulation", "--set", "simulation.cpus=2")
    assert running.finish() == 0, running.output()
    assert weights_of(running.run) == expected(small("simulation.cpus=2"))[0]
    assert nobody_left(running.folder)


def test_the_simulation_refuses_too_few_actors_before_it_starts(fedstill: Start, small_file: Path) -> None:
    changes = ("--set", "simulation.cpus=1", "--set", "simulation.client_cpus=1")
    running = fedstill("run", str(small_file), "--on", "simulation", *changes)
    assert running.finish(60) == 1
    assert "2 sites need 2 actors" in running.output()
    assert "set simulation.cpus = 2" in running.output()
    assert not (running.folder / "runs").exists()


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
    assert "site south: model folder /nowhere/model: is not there" in output
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
    [folder] = [entry for entry in runs.iterdir() if (entry / "summary.json").is_file()]
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
