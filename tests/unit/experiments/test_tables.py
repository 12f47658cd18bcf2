"""Tables of runs: statistics, results by seed, and what a report says of gaps."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from scipy import stats

from fedstill.common.config import ConfigError
from fedstill.experiments.compare.columns import Column
from fedstill.experiments.compare.drawing import COLOURS, NoPicture
from fedstill.experiments.compare.formatting import gaps, order_text
from fedstill.experiments.compare.paper_pictures import domains, expected_labels, local_losses, pseudo_labels
from fedstill.experiments.compare.pictures import together
from fedstill.experiments.compare.report import as_csv, markdown, write_report
from fedstill.experiments.compare.results import Results, value_of
from fedstill.experiments.compare.runner import Progress, Run, run_folder, state_of
from fedstill.experiments.compare.significance import Difference, agreement, detectable, holm, paired, spread
from fedstill.experiments.compare.tables import Table
from tests.unit.experiments.conftest import TABLE, read_table

# --- statistics ---


def test_holm_by_hand() -> None:
    tests = {name: Difference(0.1, 0.1, p, 20) for name, p in (("a", 0.03), ("b", 0.01), ("c", None), ("d", 0.02))}
    found = holm({**tests, "e": Difference(0.1, 0.1, 0.5, 20)})
    # sorted: 4 x 0.01, 3 x 0.02, 2 x 0.03, 1 x 0.5, and never below the one before
    assert {name: test.corrected for name, test in found.items()} == pytest.approx(
        {"a": 0.06, "b": 0.04, "c": None, "d": 0.06, "e": 0.5}
    )
    assert [name for name, test in found.items() if test.sure] == ["b"]
    assert found["b"].says == "p = 0.010, Holm = 0.040, n = 20"


@pytest.mark.parametrize(("n", "effect"), [(20, 0.660), (5, 1.682), (3, 3.260)])
def test_what_a_paired_test_can_see(n: int, effect: float) -> None:
    """Effects of a paired t-test at 5 % with a power of 0.8, as printed in tables of power."""
    assert detectable(1.0, n) == pytest.approx(effect, abs=0.01)
    hits, rng = 0, np.random.default_rng(1)
    for draw in rng.normal(effect, 1.0, (4000, n)):
        hits += bool(stats.ttest_1samp(draw, 0.0).pvalue < 0.05)
    assert hits / 4000 == pytest.approx(0.8, abs=0.03)


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


def measured(file: Path, out: Path, **values: list[float]) -> Results:
    table = read_table(file)
    for row, accuracies in values.items():
        for seed, accuracy in enumerate(accuracies, start=1):
            finish(table, out, row.replace("_", "-"), seed, accuracy)
    return Results(table, out)


def test_the_best_row_is_bold_and_tested_against_the_best_baseline(file: Path, tmp_path: Path) -> None:
    results = measured(
        file, tmp_path / "out", ours=[0.7, 0.8, 0.9], ds_fl=[0.5, 0.5, 0.5], mhat=[0.6, 0.6, 0.6], isolated=[0.9] * 3
    )
    text = markdown(results)
    lines = {line.split(" | ")[0].strip("| "): line for line in text.splitlines() if line.startswith("|")}
    assert "from the best baseline, MHAT" in lines["row"]
    assert "| **0.800 ± 0.100** | 80.0 | +0.200 ± 0.100 (p = 0.074, Holm = 0.074, n = 3) | 1.0 kB |" in lines["ours"]
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


def test_a_failed_seed_is_named_and_nothing_is_averaged_over_the_rest(file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    table = read_table(file)
    failed = run_folder(out, "ours", 3)
    failed.mkdir(parents=True)
    (failed / "config.toml").write_text(table.config("ours", 3).to_toml())
    (failed / "failed.json").write_text(json.dumps({"error": "ValueError: no luck"}))
    results = measured(file, out, ours=[0.7, 0.9], ds_fl=[0.5] * 3, mhat=[0.6] * 3)
    text = markdown(results)
    assert "| ours (2 of 3 seeds) | 0.700, 0.900 | 80.0 | – |" in text
    assert "ours: 2 of 3 seeds, seed 3 failed: ValueError: no luck. No mean is given" in text
    assert "Not run: isolated." in text
    assert "0.800" not in text
    assert results.failed == {"ours": {3: "failed: ValueError: no luck"}}
    assert results.facts()["rows"]["ours"]["columns"]["central.accuracy"]["mean"] is None
    assert results.best(table.columns[0]) == ["mhat"]
    assert "over 2 rows; no pair is the other way round" in order_text(results, table.columns[0])


def test_rows_that_share_the_best_mean_are_all_marked(file: Path, tmp_path: Path) -> None:
    results = measured(file, tmp_path / "out", ours=[0.6] * 3, ds_fl=[0.5, 0.6, 0.7], mhat=[0.5] * 3)
    assert results.best(results.table.columns[0]) == ["ds-fl", "ours"]


def test_a_column_that_no_run_has_says_which_scores_there_are(file: Path, tmp_path: Path) -> None:
    file.write_text(TABLE.replace("central.accuracy", "central.f1"))
    with pytest.raises(ConfigError, match=r"column central\.f1: the runs have no score 'f1', but: accuracy"):
        markdown(measured(file, tmp_path / "out", ours=[0.7, 0.8, 0.9]))


@pytest.mark.parametrize("score", ["semantic_distance", "semantic_distance_tweets"])
def test_a_shorter_distance_is_better_in_one_domain_as_in_all(file: Path, tmp_path: Path, score: str) -> None:
    file.write_text(TABLE.replace("central.accuracy", f"central.{score}"))
    table = read_table(file)
    for row, value in (("ours", 0.5), ("mhat", 0.7)):
        for seed in (1, 2, 3):
            finish(table, tmp_path / "out", row, seed, 0.5)
            path = run_folder(tmp_path / "out", row, seed) / "summary.json"
            path.write_text(json.dumps({**json.loads(path.read_text()), "central": {score: value}}))
    assert Results(table, tmp_path / "out").best(table.columns[0]) == ["ours"]


# --- pictures of single papers ---


def test_pseudo_labels_and_losses_are_drawn_pass_by_pass(file: Path, tmp_path: Path) -> None:
    """Two rounds of two passes: places 0.5, 1, 1.5 and 2; the mean over two seeds."""
    results = measured(file, tmp_path / "out", ours=[0.7, 0.8])
    for seed, shift in ((1, 0.0), (2, 0.2)):
        told = [
            {"event": kind, "round": n, "pass": p, "together": together}
            for n in (1, 2) for p in (1, 2)
            for kind, together in (
                ("pseudo_labels", {"largest": 0.6}), ("pseudo_label_accuracy", 0.5 + 0.1 * n + shift),
            )
        ]  # fmt: skip
        told += [{"event": "local_losses", "round": n, "sites": {"north": [0.9, 0.4 / n]}} for n in (1, 2)]
        path = run_folder(tmp_path / "out", "ours", seed) / "events.jsonl"
        path.write_text("".join(json.dumps(event) + "\n" for event in told))
    figure, _ = pseudo_labels(results)
    accuracy, largest = figure.axes
    assert [list(line) for line in accuracy.lines[0].get_xydata()] == [
        pytest.approx(point) for point in ([0.5, 0.7], [1.0, 0.7], [1.5, 0.8], [2.0, 0.8])
    ]
    assert set(largest.lines[0].get_ydata()) == {0.6}
    losses, _ = local_losses(results)
    assert list(losses.axes[0].lines[0].get_ydata()) == pytest.approx([0.4, 0.2])  # of the last epoch
    with pytest.raises(NoPicture, match="not dealt by domain"):
        domains(results)


def test_sites_with_domains_of_their_own_are_drawn_apart(file: Path, tmp_path: Path) -> None:
    """No run is needed: the picture is of the texts that the first seed deals."""
    sites = 'data = { private = 60, partition = "domain" }\nsites = [{ name = "imdb" }, { name = "rotten" }]'
    file.write_text(TABLE.replace('sites = [{ name = "north" }]', sites))
    figure, caption = domains(Results(read_table(file), tmp_path / "out"))
    points = {str(dots.get_label()): len(dots.get_offsets()) for dots in figure.axes[0].collections}
    assert set(points) == {"imdb", "rotten"}
    assert sum(points.values()) == 60
    assert "up to 1000 texts a site" in caption


def test_expected_labels_are_boxes_by_true_label(file: Path, tmp_path: Path) -> None:
    results = measured(file, tmp_path / "out", ours=[0.7])
    with pytest.raises(NoPicture, match="labels that lie on a line"):
        expected_labels(results)
    said = np.array([[0.5, 0.5, 0.0], [0.0, 0.0, 1.0], [0.0, 0.2, 0.8]], np.float32)
    arrays = {"central": said, "labels": np.array([0, 2, 2]), "coordinates": np.array([[1.0], [2.0], [3.0]])}
    save_file(arrays, run_folder(tmp_path / "out", "ours", 1) / "outputs.safetensors", {"names": '["a", "b", "c"]'})
    figure, _ = expected_labels(results)
    medians = [line.get_ydata()[0] for line in figure.axes[0].lines if line.get_color() == COLOURS[1]]
    assert medians == pytest.approx([1.5, 2.9])  # of class 1: 1.5; of class 3: 3 and 2.8


def test_own_scores_by_data_set_and_over_data_sets() -> None:
    """ATC's tables: a data set's sites are averaged first, then its scores, then the data sets."""
    own = {
        "imdb-1": {"accuracy": 0.8},
        "squad-1": {"exact_match": 0.2, "f1": 0.4},
        "squad-2": {"exact_match": 0.4, "f1": 0.6},
    }
    summary = {"method": "atc", "sites": dict.fromkeys(own), "own": own}
    assert value_of(Column("own.squad.f1"), summary) == pytest.approx(0.5)
    assert value_of(Column("own.squad.mean"), summary) == pytest.approx(0.4)
    both = Column("own.imdb+squad.mean")
    assert both.is_known
    assert both.title == "mean of imdb, squad"
    assert value_of(both, summary) == pytest.approx((0.8 + 0.4) / 2)
    with pytest.raises(ConfigError, match=r"there is no site msqg; sites: imdb-1, squad-1, squad-2"):
        value_of(Column("own.imdb+msqg.mean"), summary)


def test_a_mean_of_the_last_rounds_leaves_out_the_rest(file: Path, tmp_path: Path) -> None:
    file.write_text(TABLE.replace("central.accuracy", "central.accuracy@last2").replace("rounds = 1", "rounds = 3"))
    results = measured(file, tmp_path / "out", ours=[0.9])
    lines = ["round,node,accuracy", *(f"{number},central,{number / 10}" for number in range(4)), "3,north,0.9"]
    metrics = run_folder(tmp_path / "out", "ours", 1) / "metrics.csv"
    metrics.write_text("\n".join(lines))
    (column, *_) = results.table.columns
    assert column.title == "accuracy, central model, mean of the last 2 rounds"
    assert results.values("ours", column) == {1: pytest.approx(0.25)}
    assert results.table.paper("ours", column) == 80
    metrics.write_text("\n".join([*lines[:2], lines[4]]))  # tested at the end alone
    with pytest.raises(ConfigError, match=r"was not tested after each of its last 2 rounds; set report\.evaluate"):
        results.values("ours", column)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (("@last2", "@last4"), "row ds-fl:\n  rounds: 3 are fewer than column central.accuracy@last4 is a mean of"),
        (("[rows.ds-fl]\n", '[rows.ds-fl]\nreport.evaluate = "end"\n'), "row ds-fl:\n  report.evaluate: column"),
        (("@last2", "@first2"), "'central.accuracy@first2' is no column"),
        (("central.accuracy@last2", "alone.accuracy@last2"), "'alone.accuracy@last2' is no column"),
    ],
)
def test_a_mean_of_rounds_that_no_run_has_is_refused(file: Path, change: tuple[str, str], reason: str) -> None:
    text = TABLE.replace("central.accuracy", "central.accuracy@last2").replace("rounds = 1", "rounds = 3")
    file.write_text(text.replace(*change))
    with pytest.raises(ConfigError, match=re.escape(reason)):
        read_table(file)


def test_the_report_needs_nothing_beside_itself(file: Path, tmp_path: Path) -> None:
    file.write_text(TABLE.replace('"A table"', "\"<i>A & B</i> 'https://example.org'\""))
    results = measured(file, tmp_path / "out", ours=[0.7, 0.8, 0.9], mhat=[0.6, 0.7, 0.6])
    text = write_report(results).read_text()
    assert "&lt;i&gt;A &amp; B&lt;/i&gt;" in text
    references = re.findall(r"""(?:src|href|srcset|data)\s*=\s*["']?([^"'\s>]+)|url\(([^)]*)\)|@import""", text)
    assert {(a or b)[:22] for a, b in references} == {
        "data:image/png;base64,",
        "#table",
        "#intervals",
        "#pictures",
        "#settings",
        "#about",
    }
    assert "<script" not in text
    assert "<link" not in text
    assert "No finished run has kept its models&#x27; outputs." in text  # why there are no boxes


# --- what a run's folder holds ---


def test_a_folder_is_finished_changed_or_half_written(file: Path, tmp_path: Path) -> None:
    table, out = read_table(file), tmp_path / "out"
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


def test_time_left_follows_from_finished_runs_of_the_same_row(file: Path) -> None:
    table = read_table(file)
    waiting = [Run(row, 1, table.config(row, 1), file.parent) for row in ("ours", "mhat")]
    assert Progress(4, 2, waiting=waiting).left() is None
    # the row that was seen takes 10 s, the other as long as runs take on average: (10 + 20) / 2 jobs, at least 20
    assert Progress(4, 2, waiting=waiting, took={"ours": [10.0], "ds-fl": [30.0]}).left() == pytest.approx(20.0)
    assert Progress(4, 1, waiting=waiting, took={"ours": [10.0], "ds-fl": [30.0]}).left() == pytest.approx(30.0)
