"""Output of a table: Markdown, CSV, and a self-contained HTML page."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

from fedstill.common.checkpoint import write_atomically
from fedstill.experiments.compare import html_report as page
from fedstill.experiments.compare.formatting import gaps, head, line, notes, other_differences, shortened
from fedstill.experiments.compare.pictures import draw_all
from fedstill.experiments.compare.results import Results


def write_report(results: Results) -> Path:
    """Write table.md, table.csv, results.json, pictures/ and report.html; return the latter's path."""
    out = results.out
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(out / "table.md", markdown(results))
    write_atomically(out / "table.csv", as_csv(results))
    write_atomically(out / "results.json", json.dumps(results.facts(), indent=1) + "\n")
    write_atomically(out / "report.html", page.write(results, draw_all(results, out / "pictures")))
    return out / "report.html"


def markdown(results: Results) -> str:
    """Return the table as Markdown."""
    lines = [f"# {results.table.settings.title}", ""]
    if results.table.settings.caption:
        lines += [results.table.settings.caption, ""]
    lines += _pipes([head(results), *(line(results, row) for row in results.rows)])
    lines += ["", *(f"* {note}" for note in notes(results)), *(f"* **{gap}**" for gap in gaps(results))]
    if further := other_differences(results):
        lines += ["", "## Further scores against their best baseline", "", *_pipes(further)]
    return "\n".join(lines) + "\n"


def _pipes(rows: list[list[str]]) -> list[str]:
    escaped = [[text.replace("|", "\\|") for text in row] for row in rows]
    head, *body = (f"| {' | '.join(row)} |" for row in escaped)
    return [head, "|" + "---|" * len(rows[0]), *body]


def as_csv(results: Results) -> str:
    """Return the table for programs: one line per row and column, with every seed's value."""
    text = io.StringIO()
    seeds = results.table.settings.seeds
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(
        ["row", "column", "mean", "deviation", "seeds", "of", "best", "paper", "baseline", "difference",
         "difference_deviation", "p", *(f"seed_{seed}" for seed in seeds), "missing"]
    )  # fmt: skip
    for row, result in results.rows.items():
        for column in results.table.columns:
            spread, difference = results.spread(row, column), results.difference(row, column)
            values = results.values(row, column) or {}
            writer.writerow(
                [
                    row,
                    column.key,
                    *((spread.mean, spread.deviation) if spread else ("", "")),
                    len(result.summaries),
                    len(seeds),
                    "yes" if row in results.best(column) else "",
                    results.table.paper(row, column),
                    *(
                        (results.best_baseline(column), difference.mean, difference.deviation, difference.p)
                        if difference
                        else [""] * 4
                    ),
                    *(values.get(seed) for seed in seeds),
                    shortened(result.note),
                ]
            )
    return text.getvalue()
