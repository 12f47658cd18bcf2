"""The cells and sentences of a table, the same in every output format."""

from __future__ import annotations

from fedstill.common.readable import size
from fedstill.experiments.compare.columns import Column
from fedstill.experiments.compare.results import Results
from fedstill.experiments.compare.significance import Difference, Spread

LONG = 400  # characters of a failure's reason that fit beside a table


def number(column: Column, value: float) -> str:
    """Format a value for its column."""
    if column.key.startswith("bytes"):
        return size(value)
    return f"{value:.0f}" if column.key == "seconds" else f"{value:.3f}"


def spread_text(column: Column, spread: Spread) -> str:
    """Format mean and deviation; bytes hardly differ between seeds and show no deviation."""
    if spread.deviation is None or column.key.startswith("bytes"):
        return number(column, spread.mean)
    return f"{number(column, spread.mean)} ± {number(column, spread.deviation)}"


def cell(results: Results, row: str, column: Column) -> str:
    """Format mean and deviation of a complete row; else the single values, never their mean."""
    spread = results.spread(row, column)
    if spread is not None:
        return spread_text(column, spread)
    values = results.values(row, column)
    return ", ".join(number(column, value) for value in values.values()) if values else "–"


def difference_text(difference: Difference | None) -> str:
    """Format a difference from the best baseline and its test."""
    if difference is None:
        return "–"
    deviation = "" if difference.deviation is None else f" ± {difference.deviation:.3f}"
    return f"{difference.mean:+.3f}{deviation} ({difference.says})"


def paper_text(value: float | None) -> str:
    """Format the paper's number as the paper prints it."""
    return "–" if value is None else f"{value:g}" if value % 1 else f"{value:.1f}"


def order_text(results: Results, column: Column) -> str:
    """Describe where the order of the rows agrees with the paper's."""
    agreement = results.agreement(column)
    if agreement is None:
        return ""
    name = results.table.title
    tau = "undefined (one of the orders is all ties)" if agreement.tau is None else f"{agreement.tau:+.2f}"
    order = f"Order by {column.title}: Kendall's tau with the paper's order is {tau} over {agreement.rows} rows"
    if not agreement.discordant:
        return f"{order}; no pair is the other way round."
    pairs = "; ".join(f"{name(a)} and {name(b)}" for a, b in agreement.discordant)
    return f"{order}; {len(agreement.discordant)} of {agreement.pairs} pairs are the other way round here: {pairs}."


def shortened(reason: str) -> str:
    """Cut a reason to one line; failed.json and results.json have all of it."""
    one_line = " ".join(reason.split())
    return one_line if len(one_line) <= LONG else f"{one_line[: LONG - 1]}…"


def head(results: Results) -> list[str]:
    """Return the table's column titles."""
    titles = ["row"]
    for column in results.table.columns:
        titles.append(column.title)
        if any(results.table.paper(row, column) is not None for row in results.rows):
            titles.append("paper")
        if column == results.table.main and (base := results.best_baseline(column)) is not None:
            titles.append(f"from the best baseline, {results.table.title(base)}")
    return titles


def line(results: Results, row: str, mark: str = "**") -> list[str]:
    """Return a row's cells; the best of a column between marks."""
    cells = [results.title(row)]
    for column in results.table.columns:
        text = cell(results, row, column)
        cells.append(f"{mark}{text}{mark}" if row in results.best(column) else text)
        if any(results.table.paper(other, column) is not None for other in results.rows):
            cells.append(paper_text(results.table.paper(row, column)))
        if column == results.table.main and results.best_baseline(column) is not None:
            cells.append(difference_text(results.difference(row, column)))
    return cells


def notes(results: Results) -> list[str]:
    """Return the notes below the table."""
    settings = results.table.settings
    seeds = ", ".join(map(str, settings.seeds))
    what = f"Mean ± sample deviation over {len(settings.seeds)} seeds ({seeds})"
    if len(settings.seeds) == 1:
        what = f"One seed ({seeds}), so there is no deviation and no test"
    sentences = [f"{what}; the best row of a score is bold."]
    if settings.bounds:
        bounds = ", ".join(map(results.table.title, settings.bounds))
        sentences.append(f"Out of competition, as bounds: {bounds}.")
    if results.table.main is not None and results.best_baseline(results.table.main) is not None:
        sentences.append(
            "Differences are paired by seed; p is of a two-sided paired t-test, then corrected by Holm's procedure for "
            "all rows of the table; the best baseline was chosen by these same seeds, which is in its favour."
        )
        tests = [results.difference(row, results.table.main) for row in results.competitors]
        seen = sorted(test.detectable for test in tests if test is not None and test.detectable is not None)
        if seen:
            sentences.append(
                f"A single test at 5 % finds a true difference of {seen[0]:.3f} to {seen[-1]:.3f}, by row, four times "
                "in five."
            )
    if isinstance(caption := settings.paper.get("caption"), str):
        sentences.append(f"Paper: {caption}")
    orders = [order_text(results, column) for column in results.table.columns if column.is_score]
    return [*sentences, *filter(None, orders)]


def gaps(results: Results) -> list[str]:
    """List rows that lack seeds, and why; rows not started share one line."""
    sentences = []
    for row, result in results.rows.items():
        if result.missing and not result.untouched:
            no_mean = " No mean is given: the values are those of single seeds, and the row is in no test and no order."
            sentences.append(
                f"{results.table.title(row)}: {shortened(result.note)}.{no_mean if result.summaries else ''}"
            )
    untouched = [results.table.title(row) for row, result in results.rows.items() if result.untouched]
    return [*sentences, f"Not run: {'; '.join(untouched)}."] if untouched else sentences


def other_differences(results: Results) -> list[list[str]]:
    """Compare the further scores with their best baselines: a head, then one line per row; empty if there is none."""
    further = [column for column in results.table.columns if column.is_score and column != results.table.main]
    further = [column for column in further if results.best_baseline(column) is not None]
    if not further:
        return []
    names = [f"{column.title}, from {results.table.title(str(results.best_baseline(column)))}" for column in further]
    rows = [
        [results.table.title(row), *(difference_text(results.difference(row, column)) for column in further)]
        for row in results.rows
    ]
    return [["row", *names], *rows]
