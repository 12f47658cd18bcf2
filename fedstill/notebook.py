"""How a result shows itself in a notebook: a sentence, the sites as a table, and the scores by round as curves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from fedstill.common.readable import duration, main_score, size

if TYPE_CHECKING:
    from fedstill.api import Result

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 260, 46, 130, 12, 34
COLOURS = ("#b4501a", "#2a7573", "#7548a0", "#a83a68", "#5a7419", "#3d69ad", "#85691a", "#5b616b")
CENTRAL, SOFT = "#2f7fd1", "#808791"  # readable on a light page and on a dark one
MANY = 8  # sites that get a curve each


def html(result: Result) -> str:
    """Return the display of a run's result."""
    summary = result.summary
    if summary["status"] != "finished":
        words = f"{summary['status']}: {summary.get('reason', '')}"
        return f"<p><b>{escape(result.folder.name)}</b> {escape(words)}</p>"
    metric = main_score(summary["central"]) if summary["central"] else "score"
    seconds = summary["seconds"]["total"]
    head = f"{summary['method']}, {summary['rounds']} rounds, {duration(seconds)}; {metric}"
    parts = [f"<p><b>{escape(result.folder.name)}</b> {escape(head)}</p>", _table(summary, metric)]
    series = _series(result.history, metric)
    return "".join([*parts, _curves(series, int(summary["rounds"]), metric) if series else ""])


def _table(summary: Mapping[str, Any], metric: str) -> str:
    rows = [
        [name, site["model"], f"{site['texts']:,}", _score(site["alone"], metric), _score(site["after"], metric),
         size(site["bytes_up"]), size(site["bytes_down"])]
        for name, site in summary["sites"].items()
    ]  # fmt: skip
    if summary["central"]:
        score = _score(summary["central"], metric)
        rows.append(["central", summary["central_model"]["model"], "0", "", score, "", ""])
    if summary["centralized"]:
        score = _score(summary["centralized"], metric)
        rows.append(["all texts in one place", summary["central_model"]["model"], "", "", score, "", ""])
    top = "".join(f"<th>{column}</th>" for column in ("who", "model", "texts", "alone", "after", "sent", "got"))
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"


def _score(scores: Mapping[str, float] | None, metric: str) -> str:
    return f"{scores[metric]:.3f}" if scores and metric in scores else "–"


def _series(history: Sequence[Mapping[str, Any]], metric: str) -> dict[str, list[tuple[int, float]]]:
    """Scores by node, the central model last; the mean of the sites where they are many."""
    series: dict[str, list[tuple[int, float]]] = {}
    for row in history:
        if metric in row:
            series.setdefault(str(row["node"]), []).append((int(row["round"]), float(row[metric])))
    central = series.pop("central", [])
    if len(series) > MANY:
        rounds = sorted({number for points in series.values() for number, _ in points})
        each = {
            number: [value for points in series.values() for at, value in points if at == number] for number in rounds
        }
        series = {"mean of sites": [(number, sum(values) / len(values)) for number, values in each.items()]}
    return {**series, **({"central": central} if central else {})}


def _curves(series: Mapping[str, Sequence[tuple[int, float]]], rounds: int, metric: str) -> str:
    values = [value for points in series.values() for _, value in points]
    low, high = min(values), max(values)
    low, high = low - max(0.01, 0.08 * (high - low)), high + max(0.01, 0.08 * (high - low))

    def x(number: float) -> float:
        return LEFT + number / max(1, rounds) * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        return TOP + (high - value) / (high - low) * (HEIGHT - TOP - BOTTOM)

    label = escape(f"{metric} by round")
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img" aria-label="{label}" '
             f'font-family="system-ui, sans-serif" font-size="12" fill="{SOFT}">']  # fmt: skip
    step = 10 ** math.floor(math.log10(high - low)) / 2
    for tick in (number * step for number in range(math.ceil(low / step), math.floor(high / step) + 1)):
        at = f"{y(tick):.1f}"
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at}" y2="{at}" stroke="{SOFT}" stroke-opacity=".3"/>'
        )
        parts.append(f'<text x="{LEFT - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for number in range(0, rounds + 1, max(1, rounds // 8)):
        parts.append(f'<text x="{x(number):.1f}" y="{HEIGHT - 14}" text-anchor="middle">{number}</text>')
    ends: list[tuple[float, str, str]] = []
    for place, (name, points) in enumerate(series.items()):
        colour, width = (CENTRAL, 3.5) if name == "central" else (COLOURS[place % len(COLOURS)], 2)
        line = " ".join(f"{x(number):.1f},{y(value):.1f}" for number, value in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="{width}"/>')
        ends.append((y(points[-1][1]), name, colour))
    lowest = -math.inf
    for height, name, colour in sorted(ends):
        lowest = max(height, lowest + 15)
        shown = escape(name if len(name) <= 18 else f"{name[:17]}…")
        parts.append(f'<text x="{WIDTH - RIGHT + 8}" y="{lowest + 4:.1f}" fill="{colour}">{shown}</text>')
    return "".join([*parts, "</svg>"])
