"""Whole runs by the command line: they end with the weights that the same method has in one process."""

from __future__ import annotations

import hashlib
import json
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from fedstill.common import checkpoint
from fedstill.common.config import RunConfig
from tests.conftest import without_times
from tests.federation.conftest import Federation

from .conftest import COMMAND, Running, nobody_left

Start = Callable[..., Running]

DOMAINS = ("_imdb", "_rotten_tomatoes")  # the central model is tested on each by itself, too


def weights_of(run: Path) -> str:
    """A hash over the central model's and every site's weights as their last checkpoints have them."""
    digest = hashlib.sha256()
    folders = [run / "checkpoints", *(run / "sites" / site / run.name / "checkpoints" for site in ("north", "south"))]
    for folder in folders:
        state, _ = checkpoint.load(folder, checkpoint.rounds(folder)[-1])
        for name, value in sorted(state.get("central", state)["model"].items()):
            digest.update(name.encode() + value.tobytes())
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
    scores = [f"{score}{domain}" for score in ("accuracy", "semantic_distance") for domain in ("", *DOMAINS)]
    assert lines[0] == ",".join(["round", "node", *scores])
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
    row = json.loads(listed.stdout)[0]
    assert (row["status"], row["score"], row["central"]) == ("finished", "accuracy", summary["central"]["accuracy"])


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
