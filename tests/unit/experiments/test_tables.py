"""Tables of runs: rows that extend others, table.toml, statistics, and what a report says of gaps."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest

from fedstill.common.config import ConfigError
from fedstill.common.config.files import load_run
from fedstill.experiments.compare.formatting import gaps, order_text
from fedstill.experiments.compare.pictures import together
from fedstill.experiments.compare.report import as_csv, markdown, write_report
from fedstill.experiments.compare.results import Results
from fedstill.experiments.compare.runner import Progress, Run, run_folder, state_of
from fedstill.experiments.compare.significance import agreement, paired, spread
from fedstill.experiments.compare.tables import Table, check_tasks, find_tables, read_table

BASE = 'rounds = 1\n[method]\nlocal_epochs = 2\n[[sites]]\nname = "north"\n'
HEAD = """
title = "A table"
seeds = [1, 2, 3]
columns = ["central.accuracy", "bytes_up"]
baselines = ["ds-fl", "mhat"]
bounds = ["isolated"]
[titles]
mhat = "MHAT"
[paper]
caption = "figures"
ours = 80
mhat = 85.5
ds-fl = 70
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "table"
    made.mkdir()
    (made / "base.toml").write_text(BASE)
    (made / "table.toml").write_text(HEAD)
    for row, method in {"ours": "fedid", "ds-fl": "ds-fl", "mhat": "mhat", "isolated": "isolated"}.items():
        (made / f"{row}.toml").write_text(f'extends = "base.toml"\n[method]\nname = "{method}"\n')
    return made


def refused(folder: Path) -> str:
    with pytest.raises(ConfigError) as error:
        read_table(folder)
    return str(error.value)


# --- extends ---


def test_a_row_has_what_it_extends_key_by_key_and_lists_as_a_whole(tmp_path: Path) -> None:
    (tmp_path / "up").mkdir()
    (tmp_path / "far.toml").write_text(
        'rounds = 9\n[data]\ntest = 7\nprivate = 50\n[[sites]]\nname = "a"\n[[sites]]\nname = "b"'
    )
    (tmp_path / "up/near.toml").write_text('extends = "../far.toml"\nseed = 4\n[data]\ntest = 8\n')
    (tmp_path / "up/row.toml").write_text('extends = "near.toml"\n[data]\nalpha = 0.5\n[[sites]]\nname = "c"\n')
    config = load_run(tmp_path / "up/row.toml", ["rounds=3"])
    assert (config.rounds, config.seed, config.data.test, config.data.private, config.data.alpha) == (3, 4, 8, 50, 0.5)
    assert [site.name for site in config.sites] == ["c"]


def test_files_that_extend_each_other_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('extends = "b.toml"')
    (tmp_path / "b.toml").write_text('extends = "./a.toml"')
    with pytest.raises(ConfigError, match=r"extends: .* circle \(a\.toml -> b\.toml -> a\.toml\)"):
        load_run(tmp_path / "a.toml")


@pytest.mark.parametrize("text", ['extends = "none.toml"', "extends = 3"])
def test_what_cannot_be_extended_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "row.toml").write_text(text)
    with pytest.raises(ConfigError, match=r"row\.toml:\n  extends: "):
        load_run(tmp_path / "row.toml")


def test_a_configuration_without_a_file_extends_nothing() -> None:
    with pytest.raises(ConfigError, match="extends"):
        load_run('extends = "base.toml"\nrounds = 1\n')


# --- reading ---


def test_a_table_is_read_with_its_rows(folder: Path) -> None:
    table = read_table(folder)
    assert list(table.rows) == ["ds-fl", "isolated", "mhat", "ours"]
    assert table.rows["ours"].method.parameters() == {"local_epochs": 2}
    assert table.config("mhat", 3).seed == 3
    assert [table.title(row) for row in ("mhat", "ours")] == ["MHAT", "ours"]
    first, second = table.columns
    assert (table.paper("mhat", first), table.paper("isolated", first), table.paper("ours", second)) == (
        85.5,
        None,
        None,
    )


def test_a_folder_may_hold_several_tables(folder: Path) -> None:
    (folder.parent / "second").mkdir()
    (folder.parent / "second/table.toml").write_text(HEAD)
    (folder.parent / "no table").mkdir()
    assert find_tables(folder.parent) == [folder.parent / "second", folder]
    assert find_tables(folder) == [folder]
    with pytest.raises(ConfigError, match=r"no table\.toml in it"):
        find_tables(folder.parent / "no table")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("seeds = [1, 2, 3]\n", ""), "seeds: Field required"),
        (("seeds = [1, 2, 3]", "seeds = []"), "seeds: List should have at least 1 item"),
        (("seeds = [1, 2, 3]", "seeds = [1, 1]"), "seeds: seeds are different whole numbers"),
        (("seeds = [1, 2, 3]", 'seeds = ["1"]'), "seeds.0: Input should be a valid integer"),
        (("title =", "tilte ="), "tilte: unknown key; did you mean 'title'?"),
        (("central.accuracy", "centre.accuracy"), "columns: 'centre.accuracy' is no column; write central.SCORE"),
        (('"ds-fl", "mhat"]', '"ds-fl", "mhta"]'), "baselines: 'mhta' is no row; did you mean 'mhat'?"),
        (("ours = 80", "outs = 80"), "paper: 'outs' is no row; did you mean 'ours'?"),
        (("ours = 80", 'ours = "80"'), "paper.ours: a row has a number"),
        (("ours = 80", 'ours = {"central.f1" = 8}'), "paper.ours: 'central.f1' is no column of this table"),
    ],
)
def test_a_wrong_table_names_its_file_the_key_and_the_cure(folder: Path, change: tuple[str, str], said: str) -> None:
    head = folder / "table.toml"
    assert change[0] in HEAD
    head.write_text(HEAD.replace(*change))
    found = refused(folder)
    assert found.startswith(f"{head}:\n")
    assert said in found


def test_a_row_with_an_unknown_method_key_or_no_site_names_its_file(folder: Path) -> None:
    row = folder / "ours.toml"
    row.write_text('extends = "base.toml"\n[method]\nname = "fedit"\n')
    assert f"{row}:\n  method.name: there is no method 'fedit'; did you mean 'fedid'?" in refused(folder)
    row.write_text('extends = "base.toml"\n[method]\ndistil_epochs = 2\n')
    assert "ours.toml" in refused(folder)
    assert "distil_epochs: unknown key; did you mean 'distill_epochs'?" in refused(folder)
    row.write_text("ronds = 3\n")
    assert "ours.toml:\n  ronds: unknown key; did you mean 'rounds'?" in refused(folder)
    row.write_text("rounds = 3\n")
    assert "sites: the row names no sites" in refused(folder)


def test_an_unknown_task_and_an_absent_file_name_the_row(folder: Path) -> None:
    (folder / "ours.toml").write_text('extends = "base.toml"\n[task]\nname = "film-revews"\n')
    with pytest.raises(ConfigError, match=r"ours\.toml:\n  task: .*film-revews"):
        check_tasks(read_table(folder))
    (folder / "ours.toml").write_text('extends = "base.toml"\n[task]\nname = "files"\ntrain = "nowhere.csv"\n')
    with pytest.raises(ConfigError, match=r"ours\.toml:\n  task: .*nowhere\.csv"):
        check_tasks(read_table(folder))


# --- statistics ---


def test_spread_and_paired_test_by_hand() -> None:
    about = spread([1.0, 2.0, 4.0])
    assert about.mean == pytest.approx(7 / 3)
    assert about.deviation == pytest.approx(math.sqrt((16 / 9 + 1 / 9 + 25 / 9) / 2))
    # differences 1, 2, 3: mean 2, deviation 1, t = 2 / (1 / sqrt 3) = 3.4641; for two degrees of freedom
    # p = 1 - t / sqrt(t^2 + 2), which is 1 - 3.4641 / sqrt(14) = 0.0742
    found = paired([2.0, 4.0, 6.0], [1.0, 2.0, 3.0])
    assert (found.mean, found.deviation, found.n) == (2.0, 1.0, 3)
    assert found.p == pytest.approx(1 - math.sqrt(12 / 14))
    assert found.says == "p = 0.074, n = 3"


def test_one_seed_and_no_spread_have_no_test() -> None:
    assert (spread([0.5]).deviation, paired([0.5], [0.4]).p, paired([0.5], [0.4]).says) == (None, None, "one seed")
    same = paired([0.5, 0.7], [0.4, 0.6])
    assert (same.p, same.says) == (None, "no spread, n = 2")


def test_orders_agree_by_pairs() -> None:
    # of the six pairs of a > b > c > d against b, a, d, c two are the other way round: tau = (4 - 2) / 6
    found = agreement({"a": 4, "b": 3, "c": 2, "d": 1, "x": 9}, {"a": 30, "b": 40, "c": 10, "d": 20})
    assert found.tau == pytest.approx(1 / 3)
    assert found.discordant == [("a", "b"), ("c", "d")]
    assert (found.rows, found.pairs) == (4, 6)
    tied = agreement({"a": 1, "b": 1}, {"a": 1, "b": 2})
    assert (tied.tau, tied.discordant) == (None, [])


def test_clusters_count_rounds_in_which_both_took_part() -> None:
    found = together([{"a": 0, "b": 0}, {"a": 0, "b": 1, "c": 1}], ["a", "b", "c"])
    assert np.array_equal(found, [[1, 0.5, 0], [0.5, 1, 1], [0, 1, 1]])


# --- results ---


def finish(table: Table, out: Path, row: str, seed: int, accuracy: float, sent: int = 1000) -> None:
    """What a finished run leaves, as the table reads it."""
    folder = run_folder(out, row, seed)
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(table.config(row, seed).to_toml())
    site = {"after": {"accuracy": accuracy}, "alone": None, "bytes_up": sent, "bytes_down": 2 * sent}
    summary = {"status": "finished", "method": table.rows[row].method.name, "central": {"accuracy": accuracy}}
    (folder / "summary.json").write_text(json.dumps({**summary, "sites": {"north": site}, "seconds": {"total": 2.0}}))
    (folder / "done.json").write_text(json.dumps({"on": "process", "seconds": 3.0, "torch": "2"}))


def measured(folder: Path, out: Path, **values: list[float]) -> Results:
    table = read_table(folder)
    for row, accuracies in values.items():
        for seed, accuracy in enumerate(accuracies, start=1):
            finish(table, out, row.replace("_", "-"), seed, accuracy)
    return Results(table, out)


def test_the_best_row_is_bold_and_tested_against_the_best_baseline(folder: Path, tmp_path: Path) -> None:
    results = measured(
        folder, tmp_path / "out", ours=[0.7, 0.8, 0.9], ds_fl=[0.5, 0.5, 0.5], mhat=[0.6, 0.6, 0.6], isolated=[0.9] * 3
    )
    text = markdown(results)
    lines = {line.split(" | ")[0].strip("| "): line for line in text.splitlines() if line.startswith("|")}
    assert "from the best baseline, MHAT" in lines["row"]
    assert "| **0.800 ± 0.100** | 80.0 | +0.200 ± 0.100 (p = 0.074, n = 3) | 1.0 kB |" in lines["ours"]
    assert "| 0.600 ± 0.000 | 85.5 | – |" in lines["MHAT"]
    assert lines["isolated"].startswith("| isolated | – | – | – |")  # its central model is never trained
    assert (
        "tau with the paper's order is +0.33 over 3 rows; 1 of 3 pairs are the other way round here: MHAT and ours"
        in text
    )
    assert gaps(results) == []
    rows = list(csv.DictReader(io.StringIO(as_csv(results))))
    ours = next(row for row in rows if (row["row"], row["column"]) == ("ours", "central.accuracy"))
    assert (ours["best"], ours["baseline"], ours["seed_2"]) == ("yes", "mhat", "0.8")
    assert float(ours["p"]) == pytest.approx(1 - math.sqrt(12 / 14))


def test_a_failed_seed_is_named_and_nothing_is_averaged_over_the_rest(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    table = read_table(folder)
    failed = run_folder(out, "ours", 3)
    failed.mkdir(parents=True)
    (failed / "config.toml").write_text(table.config("ours", 3).to_toml())
    (failed / "failed.json").write_text(json.dumps({"error": "ValueError: no luck"}))
    results = measured(folder, out, ours=[0.7, 0.9], ds_fl=[0.5] * 3, mhat=[0.6] * 3)
    text = markdown(results)
    assert "| ours (2 of 3 seeds) | 0.700, 0.900 | 80.0 | – |" in text
    assert "ours: 2 of 3 seeds, seed 3 failed: ValueError: no luck. No mean is given" in text
    assert "Not run: isolated." in text
    assert "0.800" not in text
    assert results.failed == {"ours": {3: "failed: ValueError: no luck"}}
    assert results.facts()["rows"]["ours"]["columns"]["central.accuracy"]["mean"] is None
    assert results.best(table.columns[0]) == ["mhat"]
    assert "over 2 rows; no pair is the other way round" in order_text(results, table.columns[0])


def test_rows_that_share_the_best_mean_are_all_marked(folder: Path, tmp_path: Path) -> None:
    results = measured(folder, tmp_path / "out", ours=[0.6] * 3, ds_fl=[0.5, 0.6, 0.7], mhat=[0.5] * 3)
    assert results.best(results.table.columns[0]) == ["ds-fl", "ours"]


def test_a_column_that_no_run_has_says_which_scores_there_are(folder: Path, tmp_path: Path) -> None:
    (folder / "table.toml").write_text(HEAD.replace("central.accuracy", "central.f1"))
    with pytest.raises(ConfigError, match=r"column central\.f1: the runs have no score 'f1', but: accuracy"):
        markdown(measured(folder, tmp_path / "out", ours=[0.7, 0.8, 0.9]))


def test_the_report_needs_nothing_beside_itself(folder: Path, tmp_path: Path) -> None:
    head = HEAD.replace('"A table"', "\"<i>A & B</i> 'https://example.org'\"")
    (folder / "table.toml").write_text(head)
    results = measured(folder, tmp_path / "out", ours=[0.7, 0.8, 0.9], mhat=[0.6, 0.7, 0.6])
    text = write_report(results).read_text()
    assert "&lt;i&gt;A &amp; B&lt;/i&gt;" in text
    references = re.findall(r"""(?:src|href|srcset|data)\s*=\s*["']?([^"'\s>]+)|url\(([^)]*)\)|@import""", text)
    assert {(a or b)[:22] for a, b in references} == {
        "data:image/png;base64,",
        "#table",
        "#pictures",
        "#settings",
        "#about",
    }
    assert "<script" not in text
    assert "<link" not in text
    assert "No finished run has kept its models&#x27; outputs." in text  # why there are no boxes


# --- what a run's folder holds ---


def test_a_folder_is_finished_changed_or_half_written(folder: Path, tmp_path: Path) -> None:
    table, out = read_table(folder), tmp_path / "out"
    run = Run("ours", 1, table.config("ours", 1), run_folder(out, "ours", 1))
    assert state_of(run) == "new"
    finish(table, out, "ours", 1, 0.5)
    assert state_of(run) == "finished"
    (run.folder / "done.json").unlink()
    assert state_of(run) == "half"  # it was stopped between its summary and its outputs, and has no checkpoint
    for place in (run.folder / "checkpoints/round-00001", run.folder / "sites/north/seed-1/checkpoints/round-00001"):
        assert state_of(run) == "half"
        place.mkdir(parents=True)
    assert state_of(run) == "resumable"
    (run.folder / "config.toml").write_text(table.config("ours", 2).to_toml())
    assert state_of(run) == "changed"
    (run.folder / "config.toml").write_text("rounds = ")
    assert state_of(run) == "half"


def test_time_left_follows_from_finished_runs_of_the_same_row(folder: Path) -> None:
    table = read_table(folder)
    waiting = [Run(row, 1, table.config(row, 1), folder) for row in ("ours", "mhat")]
    assert Progress(4, 2, waiting=waiting).left() is None
    # the row that was seen takes 10 s, the other as long as runs take on average: (10 + 20) / 2 jobs, at least 20
    assert Progress(4, 2, waiting=waiting, took={"ours": [10.0], "ds-fl": [30.0]}).left() == pytest.approx(20.0)
    assert Progress(4, 1, waiting=waiting, took={"ours": [10.0], "ds-fl": [30.0]}).left() == pytest.approx(30.0)
