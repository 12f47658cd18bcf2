"""Scores kept beside a table's file stand for runs that are not here."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from fedstill.common.config import ConfigError
from fedstill.experiments.compare.claims import findings
from fedstill.experiments.compare.published import publish, published_file, read_published
from fedstill.experiments.compare.report import write_report
from fedstill.experiments.compare.results import Results
from fedstill.experiments.compare.runner import Progress, run_table
from fedstill.experiments.compare.table_file import read_tables
from tests.unit.experiments.conftest import BASE, HEAD, ROWS, read_table
from tests.unit.experiments.test_tables import finish

FILE = (
    HEAD
    + BASE
    + ROWS
    + '[claims]\nups = { says = "Ours is above the baselines", first = "ours", column = "central.accuracy" }\n'
)
SCORES = {"isolated": [0.4, 0.4, 0.4], "ours": [0.7, 0.72, 0.71], "mhat": [0.60, 0.61, 0.62], "ds-fl": [0.5, 0.5, 0.52]}


class Refusing:
    """Fails when a worker would be started."""

    def says(self, text: str) -> None: ...

    def moves(self, progress: Progress) -> None:
        raise AssertionError(f"{len(progress.waiting) + len(progress.running)} runs would be run")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A table whose runs were published and are gone."""
    path = tmp_path / "table.toml"
    path.write_text(FILE)
    table = read_table(path)
    for row, accuracies in SCORES.items():
        for seed, accuracy in enumerate(accuracies, start=1):
            finish(table, tmp_path / "runs", row, seed, accuracy, sent=100 * seed)
    publish(Results(table, tmp_path / "runs"))
    shutil.rmtree(tmp_path / "runs")
    return path


def test_published_scores_stand_for_runs_where_they_are_asked_for(file: Path, tmp_path: Path) -> None:
    table, out = read_table(file), tmp_path / "elsewhere"
    assert not Results(table, out).rows["ours"].summaries
    kept = read_published(table)
    assert run_table(table, out, "process", 1, Refusing(), published=kept) == []  # no worker is started
    results = Results(table, out, kept)
    assert results.values("ours", table.columns[0]) == {1: 0.7, 2: 0.72, 3: 0.71}
    assert results.best_baseline(table.columns[0]) == "mhat"
    [finding] = findings([results])
    assert finding.evidence[0].difference.mean == pytest.approx((0.1 + 0.11 + 0.09) / 3)
    assert "published" in write_report(results).read_text()


def test_a_run_here_counts_before_a_published_one(file: Path, tmp_path: Path) -> None:
    table, out = read_table(file), tmp_path / "elsewhere"
    finish(table, out, "ours", 2, 0.9)
    results = Results(table, out, read_published(table))
    assert results.values("ours", table.columns[0]) == {1: 0.7, 2: 0.9, 3: 0.71}
    publish(results)  # the newer score replaces its own and no other
    assert Results(table, tmp_path / "none", read_published(table)).values("ours", table.columns[0]) == {
        1: 0.7,
        2: 0.9,
        3: 0.71,
    }


def test_a_column_that_was_not_published_is_not_taken_for_one_without_values(file: Path, tmp_path: Path) -> None:
    file.write_text(FILE.replace('"bytes_up"]', '"bytes_up", "sites.accuracy"]'))
    table, out = read_table(file), tmp_path / "out"
    assert not Results(table, out, read_published(table)).rows["ours"].summaries  # they are run again
    finish(table, out, "ours", 2, 0.9)
    publish(Results(table, out, read_published(table)))
    kept = read_published(table)
    assert {seed: Results(table, tmp_path / "none", kept).rows["ours"].missing.get(seed) for seed in (1, 2, 3)} == {
        1: "not run",
        2: None,
        3: "not run",
    }
    file.write_text(FILE)
    results = Results(read_table(file), tmp_path / "none", read_published(read_table(file)))  # nothing else was lost
    assert results.values("ours", table.columns[0]) == {1: 0.7, 2: 0.9, 3: 0.71}


def test_a_changed_configuration_finds_no_published_score(file: Path, tmp_path: Path) -> None:
    file.write_text(FILE.replace("rounds = 1", "rounds = 9"))
    [table] = read_tables(file)
    assert set(Results(table, tmp_path / "out", read_published(table)).rows["ours"].missing) == {1, 2, 3}


@pytest.mark.parametrize("text", ["{", json.dumps({"a": {"values": {}}}), "[]"])
def test_a_damaged_file_is_named(file: Path, text: str) -> None:
    table = read_table(file)
    published_file(table).write_text(text)
    with pytest.raises(ConfigError, match=r"published/.*\.json: cannot be read as published scores"):
        read_published(table)


def test_a_place_that_cannot_be_written_is_named(file: Path, tmp_path: Path) -> None:
    table = read_table(file)
    results = Results(table, tmp_path / "none", read_published(table))
    shutil.rmtree(published_file(table).parent)
    published_file(table).parent.symlink_to(tmp_path / "gone")
    with pytest.raises(ConfigError, match=r"published/.*\.json: cannot be written \(File exists\)"):
        publish(results)
