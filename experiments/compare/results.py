"""The results of a table's runs: values by row, column and seed, and statistics over them."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np

from fedstill.common.config import ConfigError
from fedstill.experiments.compare.columns import Column
from fedstill.experiments.compare.published import VALUES, key_of
from fedstill.experiments.compare.runner import Run, read_json, run_folder, state_of
from fedstill.experiments.compare.significance import Agreement, Difference, Spread, agreement, holm, paired, spread
from fedstill.experiments.compare.tables import Table
from fedstill.experiments.compare.worker import DONE, FAILED, OWN_SCORES, SUMMARY

UNTRAINED = {"isolated": "central", "centralized": "sites"}  # whom a method never trains: their scores do not count


@dataclass(frozen=True)
class RowResult:
    """A row's finished runs by seed, and why others are missing."""

    row: str
    folders: dict[int, Path]
    summaries: dict[int, dict[str, Any]]
    missing: dict[int, str]

    @property
    def whole(self) -> bool:
        """Whether every seed finished: only then is there a mean."""
        return not self.missing

    @property
    def untouched(self) -> bool:
        """Whether no seed was started."""
        return not self.summaries and set(self.missing.values()) == {"not run"}

    @property
    def note(self) -> str:
        """What is missing, in words; empty if nothing is."""
        if self.whole:
            return ""
        by_reason: dict[str, list[str]] = {}
        for seed, reason in self.missing.items():
            by_reason.setdefault(reason, []).append(str(seed))
        reasons = "; ".join(
            f"seed{'s' if len(seeds) > 1 else ''} {', '.join(seeds)} {reason}" for reason, seeds in by_reason.items()
        )
        return f"{len(self.summaries)} of {len(self.summaries) + len(self.missing)} seeds, {reasons}"


class Results:
    """A table with everything measured for it; `published`: scores of runs that need not be run here."""

    def __init__(self, table: Table, out: Path, published: Mapping[str, dict[str, Any]] | None = None) -> None:
        self.table, self.out, self.published = table, out, published or {}
        self.rows = {row: self._read(row) for row in table.rows}

    def _read(self, row: str) -> RowResult:
        folders, summaries, missing = {}, {}, {}
        for seed in self.table.settings.seeds:
            run = Run(row, seed, self.table.config(row, seed), run_folder(self.out, row, seed))
            state = state_of(run)
            if state == "finished":
                folders[seed] = run.folder
                sites = read_json(run.folder / OWN_SCORES)
                summaries[seed] = {
                    **read_json(run.folder / SUMMARY),
                    "own": sites,
                    "done": read_json(run.folder / DONE),
                }
            elif self.published and (kept := self.published.get(key_of(run.config))) is not None:
                summaries[seed] = kept
            elif state == "failed":
                missing[seed] = f"failed: {read_json(run.folder / FAILED).get('error', 'failed.json cannot be read')}"
            elif state == "changed":
                missing[seed] = "not run with this configuration"
            else:
                missing[seed] = "not run" if state == "new" else "not finished"
        return RowResult(row, folders, summaries, missing)

    def title(self, row: str) -> str:
        """Return a row's title, with the number of its seeds if some are missing."""
        result, name = self.rows[row], self.table.title(row)
        if result.untouched:
            return f"{name} (not run)"
        return f"{name} ({len(result.summaries)} of {len(self.table.settings.seeds)} seeds)" if result.missing else name

    @property
    def failed(self) -> dict[str, dict[int, str]]:
        """Why seeds failed, by row."""
        failed = {
            row: {seed: reason for seed, reason in result.missing.items() if reason.startswith("failed")}
            for row, result in self.rows.items()
        }
        return {row: reasons for row, reasons in failed.items() if reasons}

    def values(self, row: str, column: Column) -> dict[int, float] | None:
        """Return the column's value for each finished seed; None where the method has none."""
        values = {seed: self.value(row, seed, column) for seed in self.rows[row].summaries}
        measured = {seed: value for seed, value in values.items() if value is not None}
        return measured if len(measured) == len(values) else None

    def value(self, row: str, seed: int, column: Column) -> float | None:
        """Return the column's value in one finished run; None where the method has none."""
        result = self.rows[row]
        value = value_of(column, result.summaries[seed])
        if value is None or column.rounds == 1 or seed not in result.folders:  # what is published is a mean already
            return value
        return over_last_rounds(result.folders[seed], column)

    def spread(self, row: str, column: Column) -> Spread | None:
        """Return mean and deviation over all seeds; None if one is missing."""
        values = self.values(row, column) if self.rows[row].whole else None
        return spread(list(values.values())) if values else None

    @cached_property
    def competitors(self) -> list[str]:
        """The rows that are not bounds."""
        return [row for row in self.rows if row not in self.table.settings.bounds]

    def _best(self, column: Column, rows: list[str]) -> list[str]:
        means = {row: spread.mean for row in rows if (spread := self.spread(row, column)) is not None}
        if not means or not column.is_score:
            return []
        top = (min if column.lower_is_better else max)(means.values())
        return [row for row, mean in means.items() if abs(mean - top) < 1e-9]

    def best(self, column: Column) -> list[str]:
        """Return the competitors with the best mean; empty where all share it."""
        best = self._best(column, self.competitors)
        measured = [row for row in self.competitors if self.spread(row, column) is not None]
        return [] if len(best) == len(measured) > 1 else best

    def best_baseline(self, column: Column) -> str | None:
        """Return the (first) baseline with the best mean."""
        best = self._best(column, [row for row in self.competitors if row in self.table.settings.baselines])
        return best[0] if best else None

    def difference(self, row: str, column: Column) -> Difference | None:
        """Return the difference from the best baseline, paired by seed and corrected for the table's other tests."""
        return self._differences(column).get(row)

    def _differences(self, column: Column) -> dict[str, Difference]:
        base = self.best_baseline(column)
        theirs = None if base is None else self.values(base, column)
        tests = {}
        for row in self.rows if theirs is not None else ():
            ours = None if row == base or self.spread(row, column) is None else self.values(row, column)
            if ours is not None and theirs is not None:
                tests[row] = paired([ours[seed] for seed in ours], [theirs[seed] for seed in ours])
        return holm(tests)

    def agreement(self, column: Column) -> Agreement | None:
        """Return how far the competitors' order is the paper's; None where fewer than two rows can be compared."""
        sign = -1 if column.lower_is_better else 1
        ours = {row: sign * spread.mean for row in self.competitors if (spread := self.spread(row, column)) is not None}
        theirs = {row: sign * number for row in ours if (number := self.table.paper(row, column)) is not None}
        return agreement(ours, theirs) if len(theirs) > 1 else None

    def facts(self) -> dict[str, Any]:
        """Return everything that results.json holds: numbers by seed, and their statistics."""
        rows = {}
        for row, result in self.rows.items():
            columns = {}
            for column in self.table.columns:
                spread, difference = self.spread(row, column), self.difference(row, column)
                columns[column.key] = {
                    "seeds": self.values(row, column),
                    "mean": spread and spread.mean,
                    "deviation": spread and spread.deviation,
                    "paper": self.table.paper(row, column),
                    "difference": difference
                    and {
                        "from": self.best_baseline(column),
                        **vars(difference),
                        "detectable": difference.detectable,
                    },
                }
            rows[row] = {
                "title": self.table.title(row),
                "baseline": row in self.table.settings.baselines,
                "bound": row in self.table.settings.bounds,
                "missing": result.missing,
                "columns": columns,
            }
        orders = {column.key: self.agreement(column) for column in self.table.columns if column.is_score}
        return {
            "table": self.table.name,
            "title": self.table.settings.title,
            "seeds": self.table.settings.seeds,
            "best": {column.key: self.best(column) for column in self.table.columns if column.is_score},
            "order": {key: order and vars(order) for key, order in orders.items()},
            "rows": rows,
        }


def value_of(column: Column, summary: dict[str, Any]) -> float | None:
    """Return the column's value in one run's summary; None where the method trains nobody who would have it."""
    if VALUES in summary:
        return cast("float | None", summary[VALUES].get(column.key))
    sites = summary["sites"]
    if column.key in ("bytes_up", "bytes_down"):
        return float(np.mean([site[column.key] for site in sites.values()]))
    if column.key == "seconds" and summary["done"].get("reused"):
        return None
    if column.key == "seconds":
        return float(summary["seconds"]["total"])
    if UNTRAINED.get(summary["method"]) == column.whose:
        return None
    if column.whose in ("central", "centralized"):
        return _score(column, summary[column.whose])
    if column.whose == "own":
        return float(np.mean([_own(column, data_set, summary["own"]) for data_set in column.data_sets]))
    if column.site is not None and column.site not in sites:
        raise ConfigError(f"column {column.key}: there is no site {column.site}; sites: {', '.join(sites)}")
    when = "after" if column.whose == "sites" else "alone"
    chosen = [column.site] if column.site is not None else list(sites)
    return float(np.mean([_score(column, sites[name][when]) for name in chosen]))


def _own(column: Column, data_set: str, own: dict[str, dict[str, float]]) -> float:
    """Return a score of one data set, or the mean of all its scores, averaged over the sites that have it."""
    names = [name for name in own if data_set in (name, name.rpartition("-")[0])]
    if not names:
        raise ConfigError(f"column {column.key}: there is no site {data_set}; sites: {', '.join(own)}")
    if column.score == "mean":
        return float(np.mean([np.mean(list(own[name].values())) for name in names]))
    return float(np.mean([_score(column, own[name]) for name in names]))


def scores_by_round(folder: Path, column: Column) -> dict[int, float]:
    """Return the column's score after each tested round of a run: of the central model, or the mean of sites."""
    by_round: dict[int, list[float]] = {}
    try:
        with (folder / "metrics.csv").open(encoding="utf-8", newline="") as file:
            for line in csv.DictReader(file):
                node, one = line["node"], column.site if column.whose == "sites" else None
                whose = node == one if one else (node == "central") == (column.whose == "central")
                if whose and line.get(column.score):
                    by_round.setdefault(int(line["round"]), []).append(float(line[column.score]))
    except OSError:
        return {}
    return {number: float(np.mean(values)) for number, values in by_round.items()}


def over_last_rounds(folder: Path, column: Column) -> float:
    """Return the mean of the column's score over its last rounds; round 0 is before any training and never counts."""
    curve = scores_by_round(folder, column)
    last = sorted(number for number in curve if number)[-column.rounds :]
    if len(last) < column.rounds or last[-1] - last[0] != column.rounds - 1:
        raise ConfigError(
            f"column {column.key}: {folder} was not tested after each of its last {column.rounds} rounds; "
            'set report.evaluate = "rounds" for it'
        )
    return float(np.mean([curve[number] for number in last]))


def _score(column: Column, scores: dict[str, float] | None) -> float:
    if not scores:
        raise ConfigError(f"column {column.key}: the runs have no such score; set report.{column.whose} = true for it")
    if column.score not in scores:
        raise ConfigError(f"column {column.key}: the runs have no score {column.score!r}, but: {', '.join(scores)}")
    return float(scores[column.score])
