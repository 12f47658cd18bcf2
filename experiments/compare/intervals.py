"""Means and paired differences of a table's rows with their 95 % intervals, drawn as an SVG that any page can hold."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from scipy import stats

from fedstill.experiments.compare.results import Results

WIDTH, LEFT, RIGHT, STEP, TOP, BOTTOM = 980, 250, 170, 26, 14, 30


@dataclass(frozen=True)
class Interval:
    """A row's value and half the width of its interval; None where one seed alone gives no interval."""

    name: str
    value: float
    half: float | None
    best: bool = False


def half_width(deviation: float | None, n: int) -> float | None:
    """Return half a 95 % interval of a mean by Student's t."""
    return None if deviation is None or n < 2 else float(stats.t.ppf(0.975, n - 1)) * deviation / math.sqrt(n)


def means(results: Results) -> list[Interval]:
    """Return every row's mean of the table's main score; empty where the table has none."""
    column = results.table.main
    rows = []
    for row in results.rows if column is not None else ():
        assert column is not None
        if (spread := results.spread(row, column)) is not None:
            half = half_width(spread.deviation, spread.n)
            rows.append(Interval(results.table.title(row), spread.mean, half, row in results.best(column)))
    return rows


def differences(results: Results) -> tuple[str, list[Interval]]:
    """Return the best baseline's title and the other rows' paired differences from it."""
    column = results.table.main
    base = None if column is None else results.best_baseline(column)
    if column is None or base is None:
        return "", []
    rows = []
    for row in results.rows:
        if (difference := results.difference(row, column)) is not None:
            half = half_width(difference.deviation, difference.n)
            rows.append(Interval(results.table.title(row), difference.mean, half, difference.sure))
    return results.table.title(base), rows


def draw(rows: Sequence[Interval], label: str, zero: bool = False) -> str:
    """Draw a dot and its interval for every row; `zero` marks where no difference lies."""
    ends = [end for row in rows for end in (row.value - (row.half or 0), row.value + (row.half or 0))]
    ends += [0.0] if zero else []
    low, high = min(ends), max(ends)
    room = max(0.04 * (high - low), 0.005)
    low, high = low - room, high + room
    height = TOP + STEP * len(rows) + BOTTOM

    def x(value: float) -> float:
        return LEFT + (value - low) / (high - low) * (WIDTH - LEFT - RIGHT)

    parts = [f'<svg viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" role="img" aria-label="{escape(label)}">']
    for tick in _ticks(low, high):
        parts.append(f'<line class="grid" x1="{x(tick):.1f}" x2="{x(tick):.1f}" y1="{TOP}" y2="{height - BOTTOM}"/>')
        parts.append(f'<text x="{x(tick):.1f}" y="{height - 8}" text-anchor="middle">{tick:g}</text>')
    if zero:
        parts.append(f'<line class="guide" x1="{x(0):.1f}" x2="{x(0):.1f}" y1="{TOP}" y2="{height - BOTTOM}"/>')
    for place, row in enumerate(rows):
        y = TOP + STEP * place + STEP / 2
        colour, strong = ("var(--accent)", "strong") if row.best else ("var(--soft)", "")
        parts.append(f'<text class="{strong}" x="{LEFT - 14}" y="{y + 4}" text-anchor="end">{escape(row.name)}</text>')
        if row.half is not None:
            ends_at = f'x1="{x(row.value - row.half):.1f}" x2="{x(row.value + row.half):.1f}"'
            parts.append(f'<line {ends_at} y1="{y}" y2="{y}" style="stroke: {colour}; stroke-width: 2"/>')
        parts.append(f'<circle cx="{x(row.value):.1f}" cy="{y}" r="5" style="fill: {colour}"/>')
        shown = f"{row.value:+.3f}" if zero else f"{row.value:.3f}"
        shown += "" if row.half is None else f" ± {row.half:.3f}"
        parts.append(f'<text class="{strong}" x="{WIDTH - RIGHT + 16}" y="{y + 4}">{shown}</text>')
    return "".join([*parts, "</svg>"])


def _ticks(low: float, high: float) -> list[float]:
    raw = (high - low) / 6
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(part * power for part in (1, 2, 5, 10) if part * power >= raw * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(number * step, 10) for number in range(first, last + 1)]
