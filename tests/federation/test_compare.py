"""A whole table: real workers, one that is killed, one that is stopped, and what the next call makes of it."""

from __future__ import annotations

import fcntl
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import tomli_w
from typer.testing import CliRunner

from fedstill.cli import app
from fedstill.common.config import ConfigError
from fedstill.common.config.files import load_run
from fedstill.experiments.compare import worker
from fedstill.experiments.compare.model_outputs import load_outputs, save_outputs
from fedstill.experiments.compare.report import write_report
from fedstill.experiments.compare.results import Results
from fedstill.experiments.compare.runner import Progress, Run, run_folder, run_table, state_of
from fedstill.experiments.compare.table_file import load_row, read_tables
from fedstill.experiments.compare.tables import Table
from tests.conftest import without_times
from tests.federation.conftest import Federation
from tests.federation.mixed import mixed_run

BASE = """
[base]
rounds = 1
data = { private = 48, public = 24, labelled = 8, test = 20 }
train = { learning_rate = 1e-3, max_length = 12, batch_size = 16 }
method.local_epochs = 1
central.model = "tiny-bert"
report = { alone = false, centralized = false }
sites = [{ name = "north", model = "tiny-bert" }, { name = "south", model = "tiny-bert" }]
"""


class Watching:
    """Hears what is said, and may step in."""

    def __init__(self, step: Callable[[Progress], None] = lambda progress: None) -> None:
        self.said: list[str] = []
        self.step = step

    def says(self, text: str) -> None:
        self.said.append(text)

    def moves(self, progress: Progress) -> None:
        self.step(progress)


def make(file: Path, seeds: list[int], **rows: str) -> Path:
    head = (
        f'title = "Small"\nseeds = {seeds}\ncolumns = ["central.accuracy", "sites.accuracy", "bytes_up"]\n'
        f"baselines = {[*rows][:1]}\n"
    )
    file.write_text(head + BASE + "".join(f"[rows.{row}]\n{text}\n" for row, text in rows.items()))
    return file


def read_table(file: Path) -> Table:
    (table,) = read_tables(file)
    return table


def pid_of(run: Run) -> int | None:
    try:
        lines = (run.folder / "events.jsonl").read_text().splitlines()
    except OSError:
        return None
    return next((json.loads(line)["pid"] for line in lines if '"run_started"' in line), None)


def test_every_test_text_has_its_outputs(federation: Callable[..., Federation], small: Any, tmp_path: Path) -> None:
    made = federation(small("data.test=310"))
    save_outputs(tmp_path, made.central, made.nodes)
    outputs = load_outputs(tmp_path)
    assert outputs is not None
    assert outputs["central"].shape == outputs["site/north"].shape == outputs["site/south"].shape == (310, 2)
    assert (len(outputs["embeddings"]), len(outputs["labels"])) == (310, 310)


def test_what_failed_is_said_and_run_again_and_what_is_done_is_not(tmp_path: Path) -> None:
    file = make(tmp_path / "tiny.toml", [1, 2], dsfl='method.name = "ds-fl"', oneshot='method.name = "fedkd"')
    out = tmp_path / "runs/compare/tiny"
    killed: list[int] = []

    def kill_one(progress: Progress) -> None:
        for run in progress.running:
            if run.seed == 2 and not killed and (pid := pid_of(run)) is not None:
                killed.append(pid)
                os.kill(pid, signal.SIGKILL)

    failed = run_table(read_table(file), out, "process", 2, Watching(kill_one), rows="ds*")
    assert [(run.row, run.seed) for run in failed] == [("dsfl", 2)]
    assert "was ended by signal 9" in json.loads((out / "dsfl/seed-2/failed.json").read_text())["error"]
    found = CliRunner().invoke(app, ["compare", str(file), "--runs", str(tmp_path / "runs"), "--report-only"])
    assert found.exit_code == 1
    table = (out / "table.md").read_text()
    assert "dsfl (1 of 2 seeds)" in table
    assert "dsfl: 1 of 2 seeds, seed 2 failed: the worker was ended by signal 9" in table

    finished, half = out / "dsfl/seed-1", out / "oneshot/seed-1"
    before = {path.name: path.stat().st_mtime_ns for path in finished.iterdir()}
    half.mkdir(parents=True)
    (half / "config.toml").write_text(read_table(file).config("oneshot", 1).to_toml())
    (half / "events.jsonl").write_text('{"event": "run_sta')
    second = Watching()
    assert run_table(read_table(file), out, "process", 2, second) == []
    assert {path.name: path.stat().st_mtime_ns for path in finished.iterdir()} == before
    assert second.said[:3] == [
        "oneshot, seed 1: its folder was half written, begun anew",
        "dsfl, seed 2: failed last time, begun anew",
        "1 of 4 runs are there already",
    ]
    assert not (out / "dsfl/seed-2/failed.json").exists()
    assert json.loads((half / "events.jsonl").read_text().splitlines()[0])["event"] == "run_started"

    found = CliRunner().invoke(app, ["compare", str(file), "--runs", str(tmp_path / "runs"), "--json"])
    assert found.exit_code == 0
    facts = json.loads(found.stdout)
    summary = json.loads((finished / "summary.json").read_text())
    assert facts["rows"]["dsfl"]["columns"]["central.accuracy"]["seeds"]["1"] == summary["central"]["accuracy"]
    assert facts["rows"]["oneshot"]["columns"]["central.accuracy"]["difference"]["n"] == 2
    outputs = load_outputs(finished)
    assert outputs is not None
    assert outputs["embeddings"].shape == (20, 128)
    right = outputs["central"].argmax(axis=1) == outputs["labels"]
    assert right.mean() == pytest.approx(summary["central"]["accuracy"])
    assert np.allclose(outputs["site/north"].sum(axis=1), 1, atol=1e-5)
    drawn = {"curves", "bytes", "weights", "confidence", "embeddings", "pseudo-labels", "losses", "expected"}
    assert {picture.stem for picture in (out / "pictures").iterdir()} == drawn
    assert not (finished / "checkpoints").exists()


def test_a_stopped_table_leaves_no_worker_and_goes_on_to_the_same_end(
    tmp_path: Path, federation: Callable[..., Federation]
) -> None:
    file = make(tmp_path / "tiny.toml", [5], fedid='rounds = 4\nmethod.name = "fedid"\nmethod.distill_epochs = 2')
    table, out = read_table(file), tmp_path / "out"
    run = Run("fedid", 5, table.config("fedid", 5), out / "fedid/seed-5")
    workers: list[int] = []

    def stop(progress: Progress) -> None:
        if progress.running[0].round == 2 and (pid := pid_of(progress.running[0])) is not None:
            workers.append(pid)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_table(table, out, "process", 1, Watching(stop))
    assert not psutil.pid_exists(workers[0])
    assert state_of(run) == "resumable"
    again = Watching()
    assert run_table(table, out, "process", 1, again) == []
    assert again.said[0] == "fedid, seed 5: taken up at its last checkpoint"
    events = [json.loads(line) for line in (run.folder / "events.jsonl").read_text().splitlines()]
    assert next(event["round"] for event in events if event["event"] == "resumed") >= 1
    straight = federation(load_row(file, "fedid")).run()
    assert without_times(json.loads((run.folder / "summary.json").read_text())) == without_times(straight)


def test_a_row_that_another_table_has_too_is_run_once(tmp_path: Path) -> None:
    first = make(tmp_path / "first.toml", [1], a='name = "one"\nmethod.name = "fedkd"')
    second = make(tmp_path / "second.toml", [1], b='name = "two"\nmethod.name = "fedkd"', c='method.name = "ds-fl"')
    runs = tmp_path / "runs/compare"
    assert run_table(read_table(first), runs / "first", "process", 1, Watching()) == []
    begun: list[str] = []
    watching = Watching(lambda progress: begun.extend(run.row for run in progress.running))
    assert run_table(read_table(second), runs / "second", "process", 1, watching, reuse=runs / ".shared") == []
    assert set(begun) == {"c"}
    assert watching.said[0] == "b, seed 1: taken from first, a, which is the same run"
    ours, theirs = (json.loads((runs / place / "seed-1/summary.json").read_text()) for place in ("second/b", "first/a"))
    assert ours == theirs
    assert load_run(runs / "second/b/seed-1/config.toml") == read_table(second).config("b", 1)

    other = make(tmp_path / "third.toml", [2], b='method.name = "fedkd"')  # of another seed it is another run
    again = Watching()
    assert run_table(read_table(other), runs / "third", "process", 1, again, reuse=runs / ".shared") == []
    assert again.said[0].startswith("b, seed 2: finished")


def test_a_worker_says_itself_why_it_failed(tmp_path: Path) -> None:
    file = make(tmp_path / "tiny.toml", [1], oneshot='rounds = 2\nmethod.name = "fedkd"')
    place = tmp_path / "seed-1"
    place.mkdir()
    (place / "config.toml").write_text(read_table(file).config("oneshot", 1).to_toml())
    assert worker.main(place, "process", False) == 1
    assert json.loads((place / "failed.json").read_text())["error"].startswith("ValueError: fedkd is one shot")


def test_two_calls_do_not_work_in_one_folder(tmp_path: Path) -> None:
    file = make(tmp_path / "tiny.toml", [1], alone='method.name = "isolated"')
    out = tmp_path / "out"
    out.mkdir()
    with (out / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="another `fedstill compare` runs this table"):
            run_table(read_table(file), out, "process", 1, Watching())


def test_a_row_that_the_table_has_not_is_refused(tmp_path: Path) -> None:
    file = make(tmp_path / "tiny.toml", [1], alone='method.name = "isolated"')
    with pytest.raises(ConfigError, match=r"--rows fed\*: no row .* rows: alone"):
        run_table(read_table(file), tmp_path / "out", "process", 1, Watching(), rows="fed*")


def test_sites_with_tasks_of_their_own_have_columns_and_clusters(tmp_path: Path) -> None:
    run = mixed_run(tmp_path / "files", "rounds=2", "method.assign_rounds=1", sites=("ann", "cat"))
    columns = ["sites.score", "own.ann.accuracy", "own.cat.rouge1"]
    contents = {"title": "Mixed", "seeds": [1], "columns": columns, "rows": {"atc": json.loads(run.to_json())}}
    file = tmp_path / "mixed.toml"
    file.write_text(tomli_w.dumps(contents))
    table, out = read_table(file), tmp_path / "out"
    place = run_folder(out, "atc", 1)
    place.mkdir(parents=True)
    (place / "config.toml").write_text(table.config("atc", 1).to_toml())
    assert worker.main(place, "process", False) == 0
    results = Results(table, out)
    summary, own = (json.loads((place / name).read_text()) for name in ("summary.json", "own_scores.json"))
    for site, scores in own.items():
        assert summary["sites"][site]["after"]["score"] == pytest.approx(np.mean(list(scores.values())))
    found = [results.values("atc", column) for column in table.columns]
    mean = np.mean([site["after"]["score"] for site in summary["sites"].values()])
    assert found == [{1: pytest.approx(mean)}, {1: own["ann"]["accuracy"]}, {1: own["cat"]["rouge1"]}]
    page = write_report(results).read_text()
    assert (out / "pictures/clusters.png").is_file()
    assert "The sites have tasks of their own" in page
