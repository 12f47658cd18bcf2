"""What pictures of runs share: style, figures, and what is read from a run's folder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from fedstill.experiments.compare.model_outputs import load_outputs
from fedstill.experiments.compare.results import Results

mpl.use("Agg")  # draws without a display
PAGE_DPI = 110
STYLE: Any = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "axes.edgecolor": "#888888",
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
}
# Okabe and Ito's colours, which the colour-blind can tell apart; then the same again, dashed.
MOST_POINTS = 2000  # of t-SNE, whose seconds grow faster than its points
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#555555", "#b8a900")


class NoPicture(Exception):
    """There is nothing to draw; the text says why."""


def folders_of(results: Results, row: str) -> list[Path]:
    """Return the folders of a row's finished runs."""
    return list(results.rows[row].folders.values())


def outputs_of(results: Results, row: str) -> list[dict[str, NDArray[Any]]]:
    """Return what the models of a row's finished runs said of the test texts."""
    return [kept for folder in folders_of(results, row) if (kept := load_outputs(folder)) is not None]


def why_no_outputs(results: Results) -> str:
    """Return why no run has kept its models' outputs."""
    if all(config.mixed for config in results.table.rows.values()):
        return "The sites have tasks of their own, so there are no test texts that all models answer."
    if any(
        s["done"].get("on") not in ("process", "published")
        for result in results.rows.values()
        for s in result.summaries.values()
    ):
        return "The runs were made with real sites (--on local or simulation), which keep their models to themselves."
    return "No finished run has kept its models' outputs."


def events(folder: Path, kind: str) -> Iterator[dict[str, Any]]:
    """Yield a run's events of a kind."""
    try:
        with (folder / "events.jsonl").open(encoding="utf-8") as file:
            for line in file:
                if f'"event": "{kind}"' in line:
                    yield json.loads(line)
    except (OSError, ValueError):
        return


def by_round(folder: Path, kind: str, key: str) -> dict[int, dict[str, Any]]:
    """Return a run's events of a kind by round; of a round repeated after a stop, the last."""
    return dict(sorted({int(event["round"]): event[key] for event in events(folder, kind)}.items()))


def look(results: Results, row: str) -> dict[str, Any]:
    """Return a row's colour and line, the same in every picture."""
    place = list(results.rows).index(row)
    return {"color": COLOURS[place % len(COLOURS)], "linestyle": "-" if place < len(COLOURS) else "--"}


def figure_of(width: float, height: float) -> tuple[Figure, Axes]:
    """Return a figure with one panel."""
    figure = Figure(figsize=(width, height))
    return figure, figure.subplots()


def grid_of(count: int, width: float, height: float, most: int = 3) -> tuple[Figure, list[Axes]]:
    """Return a figure with so many panels, `most` in a line."""
    columns = min(most, count)
    rows = -(-count // columns)
    figure = Figure(figsize=(max(4.0, width * columns), height * rows + 0.5))
    panels = list(np.ravel(np.asarray(figure.subplots(rows, columns, squeeze=False))))
    for axes in panels[count:]:
        axes.set_axis_off()
    return figure, panels[:count]
