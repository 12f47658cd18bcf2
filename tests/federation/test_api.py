"""fedstill from Python: runs in this process, results, the central model, and a method from another package."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import fedstill
from tests.conftest import SMALL

QUICK = {"rounds": 1, "report.alone": False, "report.centralized": False, "method.distill_epochs": 1}
EXAMPLE = Path(__file__).resolve().parents[2] / "docs/examples/fedstill-trimmed-vote"


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> fedstill.Result:
    return fedstill.run(SMALL, set=QUICK, runs=tmp_path_factory.mktemp("runs"))


def test_a_run_from_python_ends_with_scores_and_history(result: fedstill.Result) -> None:
    assert set(result.sites) == {"north", "south"}
    assert 0 <= result.central["accuracy"] <= 1
    assert {(row["round"], row["node"]) for row in result.history} == {
        (number, node) for number in (0, 1) for node in ("central", "north", "south")
    }
    last = [row for row in result.history if row["node"] == "central"][-1]
    assert last["accuracy"] == result.central["accuracy"]
    assert result.config.rounds == 1
    events = [json.loads(line)["event"] for line in (result.folder / "events.jsonl").read_text().splitlines()]
    assert events[0] == "run_started"
    assert events[-1] == "run_finished"


def test_the_central_model_classifies_as_it_was_tested(result: fedstill.Result) -> None:
    from fedstill.server.central import CentralModel

    classify = result.model()
    texts = CentralModel(result.config).texts.test
    assert texts.labels is not None
    answers = classify(list(texts.texts))  # type: ignore[arg-type]
    right = [answer["label"] == classify.labels[label] for answer, label in zip(answers, texts.labels, strict=True)]
    assert np.mean(right) == pytest.approx(result.central["accuracy"])
    assert all(0.5 <= answer["probability"] <= 1 for answer in answers)
    assert classify([]) == []


def test_a_run_that_was_cut_is_taken_up_by_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedstill.strategies.fedid import FedID

    whole = fedstill.run(SMALL, set={**QUICK, "rounds": 2}, runs=tmp_path / "whole")
    honest = FedID.round

    def cut(self: FedID, fed: fedstill.Federation) -> fedstill.Round:
        if fed.number == 2:
            raise RuntimeError("power cut")
        return honest(self, fed)

    monkeypatch.setattr(FedID, "round", cut)
    with pytest.raises(RuntimeError, match="power cut"):
        fedstill.run(SMALL, set={**QUICK, "rounds": 2}, runs=tmp_path / "cut")
    [folder] = (tmp_path / "cut").iterdir()
    assert json.loads((folder / "summary.json").read_text())["reason"] == "RuntimeError: power cut"
    monkeypatch.setattr(FedID, "round", honest)
    (folder / "summary.json").unlink()
    again = fedstill.run(SMALL, resume=folder)
    assert again.central == whole.central
    assert {n: s["after"] for n, s in again.sites.items()} == {n: s["after"] for n, s in whole.sites.items()}


def test_a_key_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(fedstill.ConfigError, match=r"roundss: unknown key; did you mean 'rounds'\?"):
        fedstill.run(SMALL, set={"roundss": 3}, runs=tmp_path)


def test_a_method_of_another_package_runs_here(tmp_path: Path) -> None:
    """The example is installed for real, into a folder of its own, and found by its entry point."""
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--target",
         str(tmp_path / "site"), str(EXAMPLE)],
        check=True, capture_output=True,
    )  # fmt: skip
    (tmp_path / "small.toml").write_text(SMALL)
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r})\n"
        "import fedstill\n"
        "assert 'trimmed-vote' in fedstill.METHODS\n"
        f"result = fedstill.run({str(tmp_path / 'small.toml')!r}, runs={str(tmp_path / 'runs')!r}, set="
        "{'method': {'name': 'trimmed-vote', 'local_epochs': 1, 'least': 1.0}, 'rounds': 1, 'report.alone': False,"
        " 'report.centralized': False})\n"
        "print(result.folder)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    folder = Path(done.stdout.strip().splitlines()[-1])
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    [votes] = [event for event in events if event["event"] == "votes"]
    assert 0 <= votes["agreed"] <= votes["texts"] == 40
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["method"] == "trimmed-vote"
    assert "voting" in summary["phases"]  # its verb's own phase
    assert summary["sites"]["north"]["bytes"]["voting"]["up"] > 40


def test_a_task_of_another_package_is_found_by_its_entry_point(tmp_path: Path) -> None:
    page = (EXAMPLE.parents[1] / "TASKS.md").read_text()
    site = tmp_path / "site"
    (site / "weather-0.1.dist-info").mkdir(parents=True)
    (site / "weather-0.1.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: weather\nVersion: 0.1\n")
    (site / "weather-0.1.dist-info/entry_points.txt").write_text("[fedstill.tasks]\nweather = weather:WEATHER\n")
    example = page.partition("# weather.py\n")[2].partition("```")[0]
    many = "for number in range(60):\n        "  # the page's rows, often enough to be split
    example = example.replace('    yield {"text": "not', f'    {many}yield {{"text": "not').replace(
        '    yield {"text": "take', '        yield {"text": "take'
    )
    (site / "weather.py").write_text(example)
    code = (
        f"import sys; sys.path.insert(0, {str(site)!r})\n"
        "import fedstill\n"
        "assert fedstill.TASKS['weather'].labels == ('sun', 'rain'), dict(fedstill.TASKS)\n"
        "assert 'weather' in list(fedstill.TASKS)\n"
        f"result = fedstill.run({SMALL!r}, runs={str(tmp_path / 'runs')!r}, set="
        "{'task.name': 'weather', 'data.private': 40, 'data.public': 16, 'data.labelled': 8, 'data.test': 16,"
        " 'rounds': 1, 'report.alone': False, 'report.centralized': False, 'method.distill_epochs': 1})\n"
        "print(sorted(result.central))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "accuracy" in done.stdout


def test_a_package_that_cannot_be_imported_stops_nobody(tmp_path: Path) -> None:
    (tmp_path / "broken-0.1.dist-info").mkdir()
    (tmp_path / "broken-0.1.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 0.1\n")
    (tmp_path / "broken-0.1.dist-info/entry_points.txt").write_text(
        "[fedstill.methods]\nmine = broken:Mine\nfedid = json:loads\n"
    )
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from fedstill import METHODS\nassert 'mine' not in METHODS\nprint(METHODS['fedid'].name, len(METHODS))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["fedid", "32"]
    assert "broken:Mine (fedstill.methods) cannot be loaded: No module named 'broken'" in done.stderr
    assert "json:loads is called 'fedid' like a built-in one" in done.stderr


def test_a_run_that_cannot_work_starts_no_process(tmp_path: Path) -> None:
    wrong = {**QUICK, "sites.south.model": str(tmp_path / "nowhere"), "data.test": 0}
    with pytest.raises(ValueError, match="this run cannot work; nothing was started") as refused:
        fedstill.run(SMALL, on="local", set=wrong, runs=tmp_path / "runs")
    assert "data.test leaves no texts" in str(refused.value)
    assert not list(tmp_path.glob("runs/*"))
