"""A run's report: one file, from what lies in the folder, drawn in a real browser; and the central model on texts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import fedstill
from fedstill.cli import app
from fedstill.common.config import RunConfig
from fedstill.deploy.launch.process import run_in_process
from fedstill.experiments.compare.intervals import Interval, draw, half_width
from fedstill.server.page.report import write_report
from fedstill.server.record import STOP, RunStopped
from fedstill.server.results import judged
from tests.browser import chromium, why_not
from tests.conftest import SMALL

needs_browser = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
Small = Callable[..., RunConfig]


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> fedstill.Result:
    return fedstill.run(SMALL, runs=tmp_path_factory.mktemp("runs"))


def opened(browser: Any, path: Path, wrong: list[str], **context: Any) -> Any:
    page = browser.new_context(offline=True, **context).new_page()
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
    page.on("dialog", lambda dialog: (wrong.append(dialog.message), dialog.dismiss()))
    page.on("request", lambda asked: None if asked.url.startswith(("file:", "data:")) else wrong.append(asked.url))
    page.goto(path.as_uri())
    return page


@needs_browser
def test_every_run_ends_with_a_report_that_opens_without_a_network(result: fedstill.Result) -> None:
    wrong: list[str] = []
    with chromium() as browser:
        page = opened(browser, result.folder / "report.html", wrong, viewport={"width": 390, "height": 800})
        assert page.locator("h1").inner_text() == result.folder.name
        assert page.locator(".pill").inner_text() == "finished"
        assert f"{result.central['accuracy']:.3f}" in page.locator(".figures").inner_text()
        headings = page.locator("h2").all_inner_texts()
        assert [each for each in headings if each != "Not learning as it should"] == [
            "The run in one picture", "Scores by round", "Sites", "Pseudo-labels, pass by pass",
            "The central model, closely", "What left each site", "Use the model", "Settings",
        ]  # fmt: skip
        for name, site in result.sites.items():
            row = page.locator("#sites tbody tr").filter(has_text=name).inner_text()
            assert f"{site['after']['accuracy']:.3f}" in row
            assert f"{site['alone']['accuracy']:.3f}" in row
        cells = page.locator("#central .matrix td").all_inner_texts()
        assert sum(map(int, cells)) == 24  # the test texts
        diagonal = (int(cells[0]) + int(cells[3])) / 24
        assert diagonal == pytest.approx(result.central["accuracy"])
        events = map(json.loads, (result.folder / "events.jsonl").read_text().splitlines())
        right = [event for event in events if event["event"] == "pseudo_label_accuracy"]
        assert len(right) == 6  # three passes in each of two rounds
        assert page.locator("#pseudo circle").count() == 18  # two sites, and together
        last = f"{round(100 * right[-1]['together'])} %"
        assert last in page.locator("#pseudo tbody tr").last.inner_text()
        assert "train.feedback" in page.locator("#left").inner_text()
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert wrong == []


@needs_browser
def test_a_run_that_failed_or_was_stopped_has_a_report_too_and_words_stay_words(small: Small, tmp_path: Path) -> None:
    config, wrong = small("report.alone=false", "report.centralized=false"), []  # type: tuple[RunConfig, list[str]]
    folder = tmp_path / "stopped"

    def watch(event: dict[str, Any]) -> None:
        if event["event"] == "round_started":
            (folder / STOP).touch()

    with pytest.raises(RunStopped, match="stopped after round 1, as asked; to go on: fedstill resume stopped"):
        run_in_process(config, folder, watch=watch)
    hostile = tmp_path / "hostile"
    hostile.mkdir()
    (hostile / "config.toml").write_text(config.to_toml().replace("small", "x</script><script>alert(1)</script>"))
    reason = "</script><img src=x onerror=alert(2)>"
    (hostile / "summary.json").write_text(json.dumps({"status": "failed", "reason": reason}))
    write_report(hostile)
    with chromium() as browser:
        page = opened(browser, folder / "report.html", wrong)
        assert page.locator(".pill").inner_text() == "stopped"
        assert page.locator("#curves circle").count() == 6  # rounds 0 and 1 of three models
        page = opened(browser, hostile / "report.html", wrong)
        assert reason in page.locator(".warning").inner_text()
        assert page.locator("img").count() == 0
    assert wrong == []
    assert run_in_process(config, folder, resume=True)["status"] == "finished"
    assert not (folder / STOP).exists()


def test_confusions_and_reliability_by_hand() -> None:
    sure = np.log(np.array([[0.9, 0.1], [0.9, 0.1], [0.4, 0.6], [0.25, 0.75]]))
    found = judged(("bad", "good"), np.array([0, 1, 1, 1]), sure)
    assert found["confusion"] == [[1, 0], [1, 2]]
    assert [(each["texts"], each["accuracy"]) for each in found["reliability"]] == [(1, 1.0), (1, 1.0), (2, 0.5)]
    assert found["ece"] == pytest.approx((0.4 + 0.25 + 2 * 0.4) / 4)


def test_intervals_are_students() -> None:
    assert half_width(1.0, 3) == pytest.approx(4.302653 / 3**0.5)  # t of 97.5 % with two degrees of freedom
    assert half_width(None, 1) is None
    picture = draw([Interval("<b>mine</b>", 0.8, 0.05, True), Interval("theirs", 0.7, None)], "scores")
    assert "&lt;b&gt;mine" in picture
    assert "0.800 ± 0.050" in picture
    assert picture.count("<circle") == 2
    assert picture.count('stroke-width: 2"/>') == 1  # one seed alone has no interval


def test_the_central_model_classifies_texts_from_the_command_line(result: fedstill.Result, tmp_path: Path) -> None:
    name = ["predict", str(result.folder)]
    done = CliRunner().invoke(app, [*name, "a fine film", "a poor film", "--json"])
    rows = json.loads(done.stdout)
    wanted = result.model()(["a fine film", "a poor film"])
    assert [(row["label"], row["text"]) for row in rows] == [
        (wanted[0]["label"], "a fine film"), (wanted[1]["label"], "a poor film"),
    ]  # fmt: skip
    (tmp_path / "texts.csv").write_text('id,text\n1,"fine, really"\n2,poor\n')
    done = CliRunner().invoke(app, [*name, "--file", str(tmp_path / "texts.csv")])
    assert done.stdout.splitlines()[0] == "label,probability,text"
    assert done.stdout.splitlines()[1].endswith(',"fine, really"')
    done = CliRunner().invoke(app, [*name, "--file", str(tmp_path / "texts.csv"), "--column", "review"])
    assert "there is no column 'review'; columns: id, text" in str(done.exception)
    assert "nothing to classify" in str(CliRunner().invoke(app, name).exception)
    lines = CliRunner().invoke(app, [*name, "--file", "-"], input="one\n\ntwo\n")
    assert len(lines.stdout.splitlines()) == 3


def test_run_prints_json_or_the_folder_alone(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(SMALL)
    changes = ["--set", "rounds=1", "--set", "report.alone=false", "--set", "report.centralized=false"]
    run = ["run", str(tmp_path / "run.toml"), "--on", "process", "--runs", str(tmp_path / "runs"), *changes]
    done = CliRunner().invoke(app, [*run, "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["status"] == "finished"
    assert "checked: about" in done.stderr
    done = CliRunner().invoke(app, [*run, "--quiet"])
    assert Path(done.stdout.strip()).parent == tmp_path / "runs"
    assert done.stderr == ""
    done = CliRunner().invoke(app, ["resume", done.stdout.strip(), "--json"])
    assert json.loads(done.stdout)["status"] == "finished"
    done = CliRunner().invoke(app, ["report", "--runs", str(tmp_path / "runs"), "--json"])
    assert Path(json.loads(done.stdout)["report"]).is_file()
    done = CliRunner().invoke(app, ["stop", "--runs", str(tmp_path / "runs")])
    assert "is not running: finished" in str(done.exception)
