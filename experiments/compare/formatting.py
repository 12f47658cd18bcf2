"""The cells and sentences of a table, the same in every form it takes."""

from __future__ import annotations

from fedstill.common.readable import size
from fedstill.experiments.compare.results import Results
from fedstill.experiments.compare.significance import Difference, Spread
from fedstill.experiments.compare.tables import Column

LONG = 400  # letters of a failure's reason that fit beside a table


def number(column: Column, value: float) -> str:
    """A value as the column shows it."""
    if column.key.startswith("bytes"):
        return size(value)
    return f"{value:.0f}" if column.key == "seconds" else f"{value:.3f}"


def spread_text(column: Column, about: Spread) -> str:
    """Mean and deviation; bytes hardly differ between seeds and have none."""
    if about.deviation is None or column.key.startswith("bytes"):
        return number(column, about.mean)
    return f"{number(column, about.mean)} ± {number(column, about.deviation)}"


def cell(results: Results, row: str, column: Column) -> str:
    """Mean and deviation of a row that has all its seeds; else the single values that there are, never their mean."""
    about = results.spread(row, column)
    if about is not None:
        return spread_text(column, about)
    values = results.values(row, column)
    return ", ".join(number(column, value) for value in values.values()) if values else "–"


def difference_text(about: Difference | None) -> str:
    """A difference from the best baseline and its test."""
    if about is None:
        return "–"
    deviation = "" if about.deviation is None else f" ± {about.deviation:.3f}"
    return f"{about.mean:+.3f}{deviation} ({about.says})"


def paper_text(value: float | None) -> str:
    """The paper's number, as the paper prints it."""
    return "–" if value is None else f"{value:g}" if value % 1 else f"{value:.1f}"


def order_text(results: Results, column: Column) -> str:
    """Where the order of the rows agrees with the paper's."""
    found = results.agreement(column)
    if found is None:
        return ""
    name = results.table.title
    tau = "undefined (one of the orders is all ties)" if found.tau is None else f"{found.tau:+.2f}"
    said = f"Order by {column.title}: Kendall's tau with the paper's order is {tau} over {found.rows} rows"
    if not found.discordant:
        return f"{said}; no pair is the other way round."
    pairs = "; ".join(f"{name(a)} and {name(b)}" for a, b in found.discordant)
    return f"{said}; {len(found.discordant)} of {found.pairs} pairs are the other way round here: {pairs}."


def shortened(reason: str) -> str:
    """A reason on one line, cut if need be; failed.json and results.json have all of it."""
    first = " ".join(reason.split())
    return first if len(first) <= LONG else f"{first[: LONG - 1]}…"


def head(results: Results) -> list[str]:
    """The table's column titles."""
    found = ["row"]
    for column in results.table.columns:
        found.append(column.title)
        if any(results.table.paper(row, column) is not None for row in results.rows):
            found.append("paper")
        if column == results.table.main and (base := results.best_baseline(column)) is not None:
            found.append(f"from the best baseline, {results.table.title(base)}")
    return found


def line(results: Results, row: str, mark: str = "**") -> list[str]:
    """A row's cells; the best of a column between marks."""
    found = [results.title(row)]
    for column in results.table.columns:
        shown = cell(results, row, column)
        found.append(f"{mark}{shown}{mark}" if row in results.best(column) else shown)
        if any(results.table.paper(other, column) is not None for other in results.rows):
            found.append(paper_text(results.table.paper(row, column)))
        if column == results.table.main and results.best_baseline(column) is not None:
            found.append(difference_text(results.difference(row, column)))
    return found


def notes(results: Results) -> list[str]:
    """What must be said under the table."""
    settings = results.table.settings
    seeds = ", ".join(map(str, settings.seeds))
    what = f"Mean ± sample deviation over {len(settings.seeds)} seeds ({seeds})"
    if len(settings.seeds) == 1:
        what = f"One seed ({seeds}), so there is no deviation and no test"
    found = [f"{what}; the best row of a score is bold."]
    if settings.bounds:
        named = ", ".join(map(results.table.title, settings.bounds))
        found.append(f"Out of competition, as bounds: {named}.")
    if results.table.main is not None and results.best_baseline(results.table.main) is not None:
        found.append(
            "Differences are paired by seed; p is of a two-sided paired t-test, not corrected for several rows; the "
            "best baseline was chosen by these same seeds, which is in its favour."
        )
    if isinstance(caption := settings.paper.get("caption"), str):
        found.append(f"Paper: {caption}")
    found += [text for column in results.table.columns if column.is_score and (text := order_text(results, column))]
    return found


def gaps(results: Results) -> list[str]:
    """Rows that lack seeds, and why; those that were not begun in one line."""
    found = []
    for row, result in results.rows.items():
        if result.missing and not result.untouched:
            alone = " No mean is given: the values are those of single seeds, and the row is in no test and no order."
            alone = alone if result.summaries else ""
            found.append(f"{results.table.title(row)}: {shortened(result.note)}.{alone}")
    untouched = [results.table.title(row) for row, result in results.rows.items() if result.untouched]
    return [*found, f"Not run: {'; '.join(untouched)}."] if untouched else found


def other_differences(results: Results) -> list[list[str]]:
    """The further scores against their best baselines: a head, then a line a row; empty if there is none."""
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
