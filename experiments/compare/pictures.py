"""Pictures of a table's runs, drawn from their records; one that cannot be drawn says why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from fedstill.experiments.compare.columns import Column
from fedstill.experiments.compare.drawing import (
    COLOURS,
    MOST_POINTS,
    PAGE_DPI,
    STYLE,
    NoPicture,
    by_round,
    figure_of,
    folders_of,
    grid_of,
    look,
    outputs_of,
    why_no_outputs,
)
from fedstill.experiments.compare.paper_pictures import domains, expected_labels, local_losses, pseudo_labels
from fedstill.experiments.compare.results import UNTRAINED, Results, scores_by_round


@dataclass(frozen=True)
class Picture:
    """A file beside the table with its caption; without a file, the caption says why."""

    title: str
    caption: str
    file: Path | None = None
    width: int = 0  # in a page's pixels, so that letters have the same size in all pictures


def draw_all(results: Results, folder: Path) -> list[Picture]:
    """Draw every picture that the runs allow."""
    folder.mkdir(parents=True, exist_ok=True)
    pictures = []
    for name, (title, draw) in PICTURES.items():
        path = folder / f"{name}.png"
        path.unlink(missing_ok=True)
        try:
            with mpl.rc_context(STYLE):
                figure, caption = draw(results)
                figure.savefig(path, dpi=2 * PAGE_DPI)
        except NoPicture as why:
            pictures.append(Picture(title, str(why)))
        else:
            pictures.append(Picture(title, caption, path, round(PAGE_DPI * figure.get_figwidth())))
    return pictures


# --- learning curves ---


def learning_curves(results: Results) -> tuple[Figure, str]:
    """Draw the main score by round: mean over seeds, and a band of one deviation."""
    column = results.table.main
    if column is None:
        raise NoPicture("The table shows no score.")
    curves = {}
    for row in results.rows:
        runs = [curve for folder in folders_of(results, row) if (curve := scores_by_round(folder, column))]
        if runs and UNTRAINED.get(results.table.rows[row].method.name) != column.whose:
            curves[row] = runs
    if not curves:
        raise NoPicture("No finished run has scores by round for the table's first column.")
    figure, axes = figure_of(7.2, 4.0)
    for row, runs in curves.items():
        rounds = sorted(set.intersection(*(set(run) for run in runs)))
        values = np.array([[run[number] for number in rounds] for run in runs])
        mean, style = values.mean(axis=0), look(results, row)
        axes.plot(rounds, mean, label=results.title(row), marker="o", markersize=3, linewidth=1.6, **style)
        if len(runs) > 1:
            deviation = values.std(axis=0, ddof=1)
            axes.fill_between(rounds, mean - deviation, mean + deviation, color=style["color"], alpha=0.12, linewidth=0)
    axes.set(xlabel="round", ylabel=column.title)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    who = "the central model" if column.whose == "central" else "the sites (mean)"
    caption = (
        f"{column.score.replace('_', ' ').capitalize()} of {who} on the test texts after each round: mean over seeds, "
        "and one sample deviation to either side. Round 0 is before any training."
    )
    return figure, caption + _by_end(results)


def _by_end(results: Results) -> str:
    rows = [row for row, config in results.table.rows.items() if config.report.evaluate == "end"]
    return " Rows that are tested at the end only have two points." if rows else ""


# --- weights of sites ---


def site_weights(results: Results) -> tuple[Figure, str]:
    """Draw the weight of each site by round, one panel per row."""
    panels = {}
    for row in results.rows:
        by_run = [by_round(folder, "weights", "weights") for folder in folders_of(results, row)]
        if any(by_run):
            panels[row] = [run for run in by_run if run]
    if not panels:
        raise NoPicture(
            "No row's method records weights of sites (fedid, adafd, sinkhorn, entropy and fedkd by class do)."
        )
    figure, grid = grid_of(len(panels), 3.2, 2.4)
    classes = False
    for axes, (row, runs) in zip(grid, panels.items(), strict=True):
        names = list(dict.fromkeys(name for run in runs for weights in run.values() for name in weights))
        for place, name in enumerate(names):
            rounds = sorted({number for run in runs for number, weights in run.items() if name in weights})
            means = []
            for number in rounds:
                values = [run[number][name] for run in runs if name in run.get(number, {})]
                classes = classes or any(isinstance(value, list) for value in values)
                means.append(np.mean([np.mean(value) for value in values]))
            line = "--" if place >= len(COLOURS) else "-"
            axes.plot(rounds, means, line, color=COLOURS[place % len(COLOURS)], marker="o", markersize=3, label=name)
        axes.set_title(results.title(row), fontsize=9, loc="left")
        numbers = [number for run in runs for number in run]
        axes.set(xlabel="round", xlim=(min(numbers) - 0.4, max(numbers) + 0.4), ylim=(0, 1.08 * axes.dataLim.y1))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    grid[0].set_ylabel("weight")
    handles = {label: handle for axes in grid for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=min(8, len(handles)))
    per_class = " Weights that differ by class are shown as their mean." if classes else ""
    text = " Weights that differ by text are shown as their mean over the public texts."
    confident = any(results.table.rows[row].method.name in ("sinkhorn", "entropy") for row in panels)
    return (
        figure,
        f"Weight of each site in the ensemble by round, mean over seeds.{per_class}{text if confident else ''}",
    )


# --- confidence ---


def confidence(results: Results) -> tuple[Figure, str]:
    """Draw the largest probability that central model and sites predict, as boxes."""
    labels, boxes, colours = [], [], []
    for row in results.rows:
        outputs = outputs_of(results, row)
        without = UNTRAINED.get(results.table.rows[row].method.name)
        parts = {
            "central": [kept["central"].max(axis=1) for kept in outputs],
            "sites": [kept[name].max(axis=1) for kept in outputs for name in kept if name.startswith("site/")],
        }
        for who, largest in parts.items():
            if largest and who != without:
                labels.append(f"{results.title(row)}, {who}")
                boxes.append(np.concatenate(largest))
                colours.append(COLOURS[0] if who == "central" else "#bbbbbb")
    if not boxes:
        raise NoPicture(why_no_outputs(results))
    figure, axes = figure_of(7.2, 0.9 + 0.24 * len(boxes))
    shown = axes.boxplot(
        boxes[::-1],
        orientation="horizontal",
        tick_labels=labels[::-1],
        patch_artist=True,
        widths=0.6,
        flierprops={"markersize": 1.5, "markeredgecolor": "#999999"},
        medianprops={"color": "black"},
    )
    for box, colour in zip(shown["boxes"], colours[::-1], strict=True):
        box.set(facecolor=colour, alpha=0.75, edgecolor="#555555")
    axes.set_xlabel("largest probability of a prediction")
    axes.grid(axis="y", visible=False)
    caption = (
        "How sure the central model (blue) and the sites (grey, all together) are of their predictions on the "
        "test texts, all seeds together: median, quartiles, and whiskers of 1.5 quartile distances."
    )
    return figure, caption


# --- clusters ---


def clusters(results: Results) -> tuple[Figure, str]:
    """Draw how often two sites were in one cluster, early and late, for every row that forms clusters."""
    panels: list[tuple[str, list[dict[str, int]]]] = []
    for row in results.rows:
        runs = [list(by_round(folder, "clusters", "clusters").values()) for folder in folders_of(results, row)]
        halves: tuple[list[dict[str, int]], list[dict[str, int]]] = ([], [])
        for rounds in runs:
            half = len(rounds) // 2
            halves[0].extend(rounds[:half])
            halves[1].extend(rounds[half:])
        for part, when in zip(halves, ("first half", "second half"), strict=True):
            if part:
                panels.append((f"{results.title(row)}, {when} of the rounds with clusters", part))
    if not panels:
        raise NoPicture("No row's method forms clusters (atc and percfl do).")
    names = list(next(iter(panels[0][1])))
    size = 1.6 + 0.34 * len(names)
    figure, grid = grid_of(len(panels), size + 0.6, size, most=2)
    for axes, (title, part) in zip(grid, panels, strict=True):
        matrix(axes, together(part, names), names, title, "viridis", 0, 1)
    return figure, "Share of rounds in which two sites were in one cluster, over all seeds."


def together(rounds: Sequence[dict[str, int]], names: Sequence[str]) -> NDArray[np.float64]:
    """Return the share of rounds in which both sites took part and shared a cluster; nan where they never met."""
    shares = np.full((len(names), len(names)), np.nan)
    for i, a in enumerate(names):
        for j, b in enumerate(names):
            met = [clusters[a] == clusters[b] for clusters in rounds if a in clusters and b in clusters]
            if met:
                shares[i, j] = np.mean(met)
    return shares


def matrix(
    axes: Axes, values: NDArray[np.float64], names: Sequence[str], title: str, colours: str, low: float, high: float
) -> None:
    """Draw a matrix of sites by sites, with its numbers."""
    shown = axes.imshow(values, cmap=colours, vmin=low, vmax=high)
    axes.set_xticks(range(len(names)), names, rotation=60, ha="right")
    axes.set_yticks(range(len(names)), names)
    axes.set_title(title, fontsize=9)
    axes.grid(visible=False)
    for i, row in enumerate(values):
        for j, value in enumerate(row):
            if np.isfinite(value):
                red, green, blue, _ = shown.cmap(shown.norm(value))
                light = 0.299 * red + 0.587 * green + 0.114 * blue > 0.5
                axes.text(
                    j, i, f"{value:.1f}", ha="center", va="center", fontsize=7, color="black" if light else "white"
                )
    axes.figure.colorbar(shown, ax=axes, fraction=0.046)


# --- bytes against score ---


def bytes_and_score(results: Results) -> tuple[Figure, str]:
    """Draw what a row costs a site in bytes, and what it scores."""
    column = results.table.main
    points = {}
    for row in results.rows:
        spread = column and results.spread(row, column)
        up, down = (results.values(row, Column(key)) or {} for key in ("bytes_up", "bytes_down"))
        if spread and up and down:
            points[row] = (float(np.mean([*up.values()]) + np.mean([*down.values()])), spread)
    if not points or column is None:
        raise NoPicture("No row has all of its seeds yet.")
    figure, axes = figure_of(7.2, 4.0)
    for place, (row, (cost, spread)) in enumerate(sorted(points.items(), key=lambda point: point[1][0])):
        style = look(results, row)
        bar = spread.deviation or 0.0
        shifted = cost / 1000 * 1.03 ** (place % 3 - 1)  # so that bars of rows with the same cost stand side by side
        title = results.title(row)
        axes.errorbar(
            shifted, spread.mean, yerr=bar, fmt="o", color=style["color"], capsize=2, elinewidth=0.8, label=title
        )
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:,.4g}")
    if max(cost for cost, _ in points.values()) < 10 * min(cost for cost, _ in points.values()):
        axes.xaxis.set_minor_formatter("{x:,.4g}")  # within one decade there may be no other tick
    axes.margins(x=0.15)
    axes.set(xlabel="kB sent and received a site in the whole run", ylabel=column.title)
    figure.legend(loc="outside right center")
    caption = (
        "Bytes that a site sends and receives in the whole run, tests and checkpoints' messages included, against the "
        "table's first score; bars are one sample deviation."
    )
    return figure, caption


# --- embeddings ---


def embeddings(results: Results) -> tuple[Figure, str]:
    """t-SNE of the central model's embeddings of test texts, coloured by label, a panel a row; the first seed."""
    from sklearn.manifold import TSNE

    panels = {}
    for row in results.rows:
        outputs = outputs_of(results, row)
        if outputs and UNTRAINED.get(results.table.rows[row].method.name) != "central":
            panels[row] = outputs[0]
    if not panels:
        raise NoPicture(why_no_outputs(results))
    figure, grid = grid_of(len(panels), 2.4, 2.3, most=4)
    for axes, (row, kept) in zip(grid, panels.items(), strict=True):
        points, labels = kept["embeddings"][:MOST_POINTS].astype(np.float32), kept["labels"][:MOST_POINTS]
        spread = min(30.0, (len(points) - 1) / 3)
        flat = TSNE(perplexity=spread, init="pca", random_state=0).fit_transform(points)
        for number, name in enumerate(kept["names"]):
            members = flat[labels == number]
            axes.scatter(
                members[:, 0], members[:, 1], s=6, alpha=0.7, linewidth=0, color=COLOURS[number % 8], label=str(name)
            )
        axes.set_title(results.title(row), fontsize=9, loc="left")
        axes.set(xticks=[], yticks=[])
    handles = {label: handle for axes in grid for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=min(8, len(handles)), markerscale=2
    )
    caption = (
        f"t-SNE of the central model's sentence embeddings (mean over tokens of the last layer) of up to "
        f"{MOST_POINTS:,} test texts, coloured by their true label, for each row's first finished seed. Distances "
        "between groups mean little."
    )
    return figure, caption


PICTURES: dict[str, tuple[str, Callable[[Results], tuple[Figure, str]]]] = {
    "curves": ("Learning curves", learning_curves),
    "bytes": ("Bytes against score", bytes_and_score),
    "weights": ("Weights of sites", site_weights),
    "confidence": ("Confidence", confidence),
    "clusters": ("Clusters of sites", clusters),
    "embeddings": ("Embeddings", embeddings),
    "pseudo-labels": ("Pseudo-labels", pseudo_labels),
    "losses": ("Losses and scores of sites", local_losses),
    "expected": ("Expected labels", expected_labels),
    "domains": ("Domains of sites", domains),
}
