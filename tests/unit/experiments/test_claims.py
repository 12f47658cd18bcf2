"""Claims over the tables of one file: paired differences by hand, correction over tables, and what is left untold."""

from __future__ import annotations

from pathlib import Path

import pytest
from scipy import stats

from fedstill.common.config import ConfigError
from fedstill.experiments.compare.claims import findings, markdown, write_claims
from fedstill.experiments.compare.results import Results
from fedstill.experiments.compare.table_file import read_tables
from tests.unit.experiments.conftest import BASE, HEAD, ROWS
from tests.unit.experiments.test_tables import finish

GRID = """
[grid.task]
easy = { title = "Easy", data.alpha = 1.0 }
hard = { title = "Hard", data.alpha = 0.1 }
"""
CLAIMS = """
[claims]
best = { says = "Ours is above the best published method", first = "ours" }
pair = { says = "MHAT is above DS-FL", first = "mhat", second = "ds-fl" }
"""
FILE = HEAD.replace('"A table"', '"A table: {task}"') + BASE + ROWS + GRID + CLAIMS
MHAT = [0.60, 0.61, 0.62]


@pytest.fixture
def family(tmp_path: Path) -> list[Results]:
    file = tmp_path / "table.toml"
    file.write_text(FILE)
    easy, hard = read_tables(file)
    values = [
        (easy, {"ours": [0.70, 0.72, 0.71], "mhat": MHAT, "ds-fl": [0.5, 0.5, 0.52]}),
        (hard, {"ours": [0.60, 0.59, 0.66], "mhat": MHAT, "ds-fl": [0.7, 0.69, 0.7]}),
    ]
    for table, rows in values:
        for row, accuracies in rows.items():
            for seed, accuracy in enumerate(accuracies, start=1):
                finish(table, tmp_path / table.name, row, seed, accuracy)
    return [Results(easy, tmp_path / easy.name), Results(hard, tmp_path / hard.name)]


def test_each_table_answers_with_its_own_best_baseline_and_all_are_corrected_together(family: list[Results]) -> None:
    best, pair = findings(family)
    easy, hard = best.evidence
    assert (easy.second, hard.second) == ("MHAT", "ds-fl")
    assert easy.difference.mean == pytest.approx((0.10 + 0.11 + 0.09) / 3)
    assert hard.difference.mean == pytest.approx((-0.10 - 0.10 - 0.04) / 3)
    p = [stats.ttest_rel([0.70, 0.72, 0.71], MHAT).pvalue, stats.ttest_rel([0.60, 0.59, 0.66], [0.7, 0.69, 0.7]).pvalue]
    assert [one.difference.corrected for one in best.evidence] == pytest.approx([2 * p[0], max(2 * p[0], p[1])])
    assert best.verdict == "holds in 1, the opposite in 0, cannot be told in 1 of 2 tables"
    assert best.overall.mean == pytest.approx((0.10 - 0.08) / 2)
    assert pair.verdict == "holds in 1, the opposite in 1, cannot be told in 0 of 2 tables"


def test_a_cost_is_no_score(tmp_path: Path) -> None:
    file = tmp_path / "table.toml"
    file.write_text(FILE.replace('first = "ours" }', 'first = "ours", column = "bytes_up" }'))
    with pytest.raises(ConfigError, match=r"claims\.best\.column: 'bytes_up' is no score"):
        read_tables(file)


def test_a_table_without_all_its_baselines_tells_nothing(tmp_path: Path, family: list[Results]) -> None:
    (tmp_path / family[1].table.name / "mhat" / "seed-2" / "done.json").unlink()  # may have been the best one
    best, pair = findings([family[0], Results(family[1].table, family[1].out)])
    assert [one.table for one in best.evidence] == ["Easy"]
    assert best.untold == pair.untold == ["Hard"]
    assert "Not finished: Hard." in markdown([best])


def test_what_is_written_can_be_read_and_seen(tmp_path: Path, family: list[Results]) -> None:
    write_claims(family, tmp_path / "claims")
    text = (tmp_path / "claims" / "claims.md").read_text()
    assert "## MHAT is above DS-FL" in text
    assert "| Easy | MHAT | **+10.00 ± 2.48** |" in text  # 4.303 x 0.01 / sqrt(3)
    for name in ("best", "pair"):
        assert (tmp_path / "claims" / f"forest-{name}.png").read_bytes()[1:4] == b"PNG"


def test_a_claim_about_a_row_that_is_not_there_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "table.toml"
    file.write_text(FILE.replace('first = "mhat"', 'first = "mhatt"'))
    with pytest.raises(ConfigError, match=r"claims\.pair: 'mhatt' is no row; did you mean 'mhat'"):
        read_tables(file)
