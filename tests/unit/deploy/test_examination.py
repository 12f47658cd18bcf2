"""`fedstill check`: each thing that can be wrong with a run, found before anything is started; and what a run costs."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from typer.testing import CliRunner

from fedstill.cli import app
from fedstill.common.config import RunConfig
from fedstill.common.config.files import load_run
from fedstill.common.readable import reason_of, sentence
from fedstill.deploy.launch import examination
from fedstill.deploy.launch.examination import Examination
from fedstill.deploy.launch.forecast import ENVELOPE
from fedstill.deploy.launch.process import assemble
from fedstill.server.link import JoinError

Small = Callable[..., RunConfig]


def failed(config: RunConfig, folder: Path, on: str = "local") -> dict[str, str]:
    """What each check that failed said."""
    return {check.name: check.said for check in Examination(config, on, folder / "runs").checks() if not check.ok}


def test_a_sound_run_passes_and_writes_nothing(small: Small, tmp_path: Path) -> None:
    seen = Examination(small(), "local", tmp_path / "runs")
    assert [check.name for check in seen.checks() if check.ok] == [
        "settings", "data", "central model", "method", "sites", "ports", "memory", "disk",
    ]  # fmt: skip
    assert list(tmp_path.iterdir()) == []
    rates = {who: trial.rates["local"] for who, trial in seen.tried()}
    assert rates == {"central": 1e-3, "north": 1e-3, "south": 1e-3}
    assert all(trial.step > 0 and trial.parameters > 1_000_000 for _, trial in seen.tried())


def test_rates_are_shown_as_they_resolve(small: Small, tmp_path: Path) -> None:
    text = small().to_toml().replace("learning_rate = 0.001\n", "")
    seen = Examination(load_run(text, ["sites.north.model=small-bert"]), "process", tmp_path)
    assert all(check.ok for check in seen.checks())
    rates = {who: (trial.rates["local"], trial.rates["distil"]) for who, trial in seen.tried()}
    assert rates["north"] == (3e-4, pytest.approx(3e-5))
    assert rates["south"] == (1e-3, pytest.approx(1e-4))
    warmup = {who: trial.warmup for who, trial in seen.tried()}
    assert (warmup["north"], warmup["south"]) == (0.06, 0.0)  # pretrained layers, and layers drawn from a seed
    fall = {who: trial.fall for who, trial in seen.tried()}
    assert (fall["north"], fall["south"]) == (0.5, 1.0)


@pytest.mark.parametrize(
    ("changes", "check", "said"),
    [
        (["data.private=200000"], "data", "make 200080 texts, but the training texts are"),
        (["data.test=0"], "data", "leaves no texts to test on"),
        (["central.model=tiny-brt"], "central model", "did you mean 'tiny-bert'?"),
        (["sites.south.model=/nowhere/model"], "sites", "site south: model folder /nowhere/model: is not there"),
        (["method.name=fedavg"], "method", "every site must be the same model"),
        (["data.labelled=0"], "method", "data.labelled is 0; give it some"),
        (["method.name=fedavgg"], "settings", "did you mean 'fedavg'?"),
        (["sites.north.max_length=5000"], "sites", "takes texts of at most"),
    ],
)
def test_what_is_wrong_is_said_with_its_cure(
    small: Small, tmp_path: Path, changes: list[str], check: str, said: str
) -> None:
    assert said in failed(small(*changes), tmp_path)[check]


def test_what_several_checks_stumble_over_is_said_once(small: Small, tmp_path: Path) -> None:
    plain = ["method.name=ds-fl", "method.reduction=none", "method.temperature=1.0"]
    wrong = failed(small(*plain), tmp_path)
    assert wrong["settings"] == (
        "[method] ds-fl: reduction = 'none' takes the plain mean, which has no temperature; take one of them out"
    )
    assert (wrong["central model"], wrong["method"]) == ("see settings", "see settings")


def test_columns_and_labels_of_a_file(small: Small, tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_text("review,verdict\n" + "fine,good\npoor,bad\n" * 100)
    changes = ["task.name=files", f"task.train={tmp_path / 'mine.csv'}", "data.private=100"]
    assert "no column 'label' (task.label); columns: review, verdict" in failed(small(*changes), tmp_path)["data"]
    columns = ["task.text=review", "task.label=verdict"]
    assert failed(small(*changes, *columns), tmp_path, "process") == {}
    wrong = failed(small(*changes, *columns, 'task.labels=["good", "awful"]'), tmp_path)["data"]
    assert "'bad'" in wrong


def test_a_port_that_is_taken(small: Small, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        listen = f"127.0.0.1:{server.getsockname()[1]}"
        assert listen in failed(small(f"exchange.listen={listen}"), tmp_path)["ports"]
    assert "ports" not in failed(small(f"exchange.listen={listen}"), tmp_path)


def test_too_little_memory_or_disk(small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=10_000_000))
    monkeypatch.setattr(examination.shutil, "disk_usage", lambda path: SimpleNamespace(free=1_000_000))
    wrong = failed(small(), tmp_path)
    assert "10.0 MB are free" in wrong["memory"]
    assert "1.0 MB are free" in wrong["disk"]


def test_a_run_elsewhere_leaves_the_sites_to_themselves(small: Small, tmp_path: Path) -> None:
    assert failed(small("sites.south.model=/srv/on/their/disk"), tmp_path, "coordinator") == {}


@pytest.mark.parametrize(
    "changes",
    [
        ["method.name=fedid", "method.distill_epochs=2"],
        ["method.name=ds-fl"],
        ["method.name=fedavg", "sites.south.model=tiny-bert"],
        ["method.name=logit-fedavg", "report.alone=false", "report.evaluate=end"],
    ],
)
def test_the_forecast_counts_exchanges_and_bytes_as_the_run_has_them(
    small: Small, tmp_path: Path, changes: list[str]
) -> None:
    config = small(*changes)
    seen = Examination(config, "process", tmp_path / "runs")
    assert all(check.ok for check in seen.checks())
    cost = seen.forecast()
    assert cost is not None

    made, asked = assemble(config, tmp_path / "run"), []
    link = made.link()
    deliver = link.deliver
    link.deliver = lambda parts, deadline: (asked.append(set(parts)), deliver(parts, deadline))[1]  # type: ignore
    summary = made.federation.run(link)
    once = 1 if config.method.name == "fedavg" else 0  # shapes are compared before the first round
    assert cost.exchanges == sum("north" in parts for parts in asked) - once
    for name, site in summary["sites"].items():
        assert cost.sites[name].texts == site["texts"]
        up, down = (sum(part[way] for part in site["formula"].values()) for way in ("up", "down"))
        assert cost.sites[name].up == up + cost.exchanges * ENVELOPE[0]
        assert cost.sites[name].down == down + cost.exchanges * ENVELOPE[1]


def test_the_command_prints_json_and_fails_with_1(small_file: Path, tmp_path: Path) -> None:
    runner = CliRunner()
    good = runner.invoke(app, ["check", str(small_file), "--json"])
    assert good.exit_code == 0, good.output
    facts = json.loads(good.stdout)
    assert facts["ok"]
    assert set(facts["cost"]["sites"]) == {"north", "south"}
    assert facts["cost"]["seconds"] == pytest.approx(sum(facts["cost"]["parts"].values()), abs=0.5)
    bad = runner.invoke(app, ["check", str(small_file), "--set", "rounds=3", "--set", "sites.south.model=/nowhere"])
    assert bad.exit_code == 1
    assert "1 of 8 checks failed: sites" in bad.stdout


def test_a_run_that_cannot_work_is_refused_before_it_has_a_folder(small_file: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    done = CliRunner().invoke(
        app, ["run", str(small_file), "--runs", str(runs), "--set", "sites.south.model=/nowhere/model"]
    )
    assert "site south: model folder /nowhere/model: is not there; check the path" in str(done.exception)
    assert not runs.exists()


def test_an_error_that_came_through_flower_is_its_sentence_again() -> None:
    assert sentence("<class 'RuntimeError'>:<'site north: no room'>") == "site north: no room"
    assert sentence("<class 'a.B'>:<'it's \"so\"\n  here'>") == 'it\'s "so" here'
    assert sentence("plain words") == "plain words"
    assert reason_of(JoinError("site north: no room")) == "site north: no room"
    assert reason_of(ZeroDivisionError("by zero")) == "ZeroDivisionError: by zero"
