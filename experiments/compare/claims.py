"""Claims over a family of tables: one row against another in each of them, paired by seed, drawn as a forest plot."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl

from fedstill.common.checkpoint import write_atomically
from fedstill.experiments.compare.columns import Column
from fedstill.experiments.compare.drawing import COLOURS, PAGE_DPI, STYLE, figure_of
from fedstill.experiments.compare.intervals import half_width
from fedstill.experiments.compare.results import Results
from fedstill.experiments.compare.significance import Difference, Spread, holm, paired, spread
from fedstill.experiments.compare.tables import Claim, Table

MOST_NAMED = 3  # tables that are not finished; of more only the number is said
POINTS = 100.0  # scores are shares; differences are easier to read in points


@dataclass(frozen=True)
class Evidence:
    """A claim in one table: who was compared with whom, and by how much the first is better."""

    table: str
    second: str  # the title of the row that it was compared with
    difference: Difference


@dataclass(frozen=True)
class Finding:
    """A claim with its evidence; p are corrected by Holm's procedure for all tables that were asked."""

    name: str
    claim: Claim
    evidence: list[Evidence]
    untold: list[str]  # tables whose runs are not all there

    @property
    def overall(self) -> Spread:
        """Mean and deviation of the tables' mean differences: a table counts once, however many seeds it has."""
        return spread([one.difference.mean for one in self.evidence])

    def count(self, sign: int) -> int:
        """In how many tables the corrected test tells a difference of this sign."""
        return sum(one.difference.sure and one.difference.mean * sign > 0 for one in self.evidence)

    @property
    def verdict(self) -> str:
        """The count in words."""
        above, below, tables = self.count(1), self.count(-1), len(self.evidence)
        return (
            f"holds in {above}, the opposite in {below}, cannot be told in {tables - above - below} of {tables} tables"
        )


def findings(family: Sequence[Results]) -> list[Finding]:
    """Ask every claim of the family's file of each table that has its rows."""
    claims = {name: claim for results in family for name, claim in results.table.settings.claims.items()}
    return [_ask(name, claim, family) for name, claim in claims.items()]


def _ask(name: str, claim: Claim, family: Sequence[Results]) -> Finding:
    tests: dict[str, Difference] = {}
    seconds, untold = {}, []
    for results in family:
        table, column = results.table, results.table.main if claim.column is None else Column(claim.column)
        if column is None or claim.first not in results.rows or claim.second not in {None, *results.rows}:
            continue
        second = claim.second or _complete_best(results, column)
        if second is None or not (results.rows[claim.first].whole and results.rows[second].whole):
            untold.append(_short(table))
            continue
        ours, theirs = results.values(claim.first, column), results.values(second, column)
        if ours and theirs:
            sign = -1.0 if column.lower_is_better else 1.0
            pairs = [(sign * ours[seed], sign * theirs[seed]) for seed in ours]
            tests[_short(table)] = paired([a for a, _ in pairs], [b for _, b in pairs])
            seconds[_short(table)] = table.title(second)
    evidence = [Evidence(title, seconds[title], test) for title, test in holm(tests).items()]
    return Finding(name, claim, evidence, untold)


def _short(table: Table) -> str:
    """Return what tells a table from the others of its file: its title behind the colon, if it has one."""
    return table.settings.title.partition(": ")[2] or table.settings.title


def _complete_best(results: Results, column: Column) -> str | None:
    """Return the best baseline once all baselines are there: before that, a better one may be missing."""
    baselines = [row for row in results.table.settings.baselines if row in results.rows]
    return results.best_baseline(column) if all(results.rows[row].whole for row in baselines) else None


def write_claims(family: Sequence[Results], out: Path) -> list[Finding]:
    """Write claims.md, claims.json and a forest plot a claim; return what was found."""
    found = [one for one in findings(family) if one.evidence]
    if found:
        out.mkdir(parents=True, exist_ok=True)
        write_atomically(out / "claims.md", markdown(found) + f"\n{cost(family)}\n")
        write_atomically(out / "claims.json", json.dumps([_facts(one) for one in found], indent=1) + "\n")
        for one in found:
            forest(one, out / f"forest-{one.name}.png")
    return found


def markdown(found: Iterable[Finding]) -> str:
    """Return the claims and their evidence as Markdown, in points."""
    lines = [
        "Differences in points, paired by seed, with 95 % intervals; p of a two-sided paired t-test, corrected by "
        "Holm's procedure for all tables of a claim. The last column is the true difference that a single test would "
        "find four times in five.",
    ]
    for one in found:
        lines += ["", f"## {one.claim.says}", "", *evidence_lines(one)]
    return "\n".join(lines) + "\n"


def evidence_lines(one: Finding) -> list[str]:
    """Return a claim's verdict and its table as lines of Markdown."""
    untold = "; ".join(one.untold) if len(one.untold) <= MOST_NAMED else f"{len(one.untold)} tables"
    missing = [f"Not finished: {untold}."] if untold else []
    if not one.evidence:
        return missing
    lines = [f"{one.verdict[0].upper()}{one.verdict[1:]}.{_overall(one)}", ""]
    lines += ["| table | compared with | difference | p | Holm | detectable |", "|---|---|---|---|---|---|"]
    for row in one.evidence:
        test = row.difference
        half = half_width(test.deviation, test.n)
        shown = f"{POINTS * test.mean:+.2f}" + ("" if half is None else f" ± {POINTS * half:.2f}")
        power = "–" if test.detectable is None else f"{POINTS * test.detectable:.2f}"
        cells = [
            row.table,
            row.second,
            f"**{shown}**" if test.sure else shown,
            _p(test.p),
            _p(test.corrected),
            power,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, "", *missing] if missing else lines


def cost(family: Iterable[Results]) -> str:
    """Return how many runs the evidence comes from, and what they took."""
    done = [run["done"] for results in family for row in results.rows.values() for run in row.summaries.values()]
    return f"{len(done)} runs, {sum(run.get('cpu_seconds', 0.0) for run in done) / 60:.0f} CPU minutes."


def _overall(one: Finding) -> str:
    whole = one.overall
    half = half_width(whole.deviation, whole.n)
    if half is None:
        return ""
    return f" Mean over tables {POINTS * whole.mean:+.2f} ± {POINTS * half:.2f}."


def _p(p: float | None) -> str:
    return "–" if p is None else "< 0.001" if p < 0.001 else f"{p:.3f}"


def _facts(one: Finding) -> dict[str, object]:
    return {
        "claim": one.name,
        "says": one.claim.says,
        "verdict": one.verdict,
        "overall": vars(one.overall),
        "tables": [
            {"table": row.table, "second": row.second, **vars(row.difference), "detectable": row.difference.detectable}
            for row in one.evidence
        ],
        "untold": one.untold,
    }


def forest(one: Finding, path: Path) -> None:
    """Draw a dot and a 95 % interval a table, filled where the corrected test is sure, and the mean over tables."""
    with mpl.rc_context(STYLE):
        figure, axes = figure_of(7.6, 1.3 + 0.3 * len(one.evidence))
        names = []
        for place, row in enumerate(one.evidence):
            test = row.difference
            half = half_width(test.deviation, test.n)
            colour = COLOURS[0] if test.sure and test.mean > 0 else COLOURS[1] if test.sure else COLOURS[6]
            axes.errorbar(
                POINTS * test.mean, -place, xerr=None if half is None else POINTS * half, fmt="o", color=colour,
                markerfacecolor=colour if test.sure else "white", capsize=3, markersize=5,
            )  # fmt: skip
            names.append(f"{row.table}  ({row.second})" if one.claim.second is None else row.table)
        whole = one.overall
        half = half_width(whole.deviation, whole.n)
        if half is not None and not math.isnan(half):
            centre, bottom = POINTS * whole.mean, -len(names) - 0.3
            axes.fill(
                [centre - POINTS * half, centre, centre + POINTS * half, centre],
                [bottom, bottom + 0.25, bottom, bottom - 0.25], color="#222222",
            )  # fmt: skip
            names.append("mean over tables")
        axes.axvline(0, color="#222222", linewidth=0.8)
        axes.set_yticks(
            [*(-place for place in range(len(one.evidence))), *([bottom] if len(names) > len(one.evidence) else [])],
            names,
        )
        axes.grid(visible=False, axis="y")
        axes.set_xlabel("points; filled: sure after correction")
        figure.suptitle(one.claim.says, x=0.01, ha="left", fontsize=10)
        figure.savefig(path, dpi=2 * PAGE_DPI)
