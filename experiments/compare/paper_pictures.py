"""Pictures that single papers have, drawn from a table's runs: expected labels, domains, losses, pseudo-labels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedstill.common.data.allocation import allocate
from fedstill.experiments.compare.columns import Column
from fedstill.experiments.compare.drawing import (
    COLOURS,
    MOST_POINTS,
    NoPicture,
    by_round,
    events,
    figure_of,
    folders_of,
    grid_of,
    look,
    outputs_of,
)
from fedstill.experiments.compare.results import UNTRAINED, Results, scores_by_round

WORDS = 5000  # features of TF-IDF (AdaFD, section IV)
Curve = dict[float, float]


# --- Confident Sinkhorns, figure 4 ---


def expected_labels(results: Results) -> tuple[Figure, str]:
    """Draw the expectation of the predicted label by true label, as boxes, a panel a row."""
    panels = {}
    for row in results.rows:
        kept = [one for one in outputs_of(results, row) if one.get("coordinates", np.empty((0, 0))).shape[1:] == (1,)]
        if kept and UNTRAINED.get(results.table.rows[row].method.name) != "central":
            expected = np.concatenate([one["central"] @ one["coordinates"][:, 0] for one in kept])
            panels[row] = (expected, np.concatenate([one["labels"] for one in kept]), kept[0]["coordinates"][:, 0])
    if not panels:
        raise NoPicture("No finished run has kept predictions of labels that lie on a line (stars, grades).")
    figure, grid = grid_of(len(panels), 2.6, 2.5)
    for axes, (row, (expected, labels, places)) in zip(grid, panels.items(), strict=True):
        present = [number for number in range(len(places)) if (labels == number).any()]
        axes.boxplot(
            [expected[labels == number] for number in present],
            positions=[float(places[number]) for number in present],
            widths=0.5 * float(np.diff(np.sort(places)).min()),
            showmeans=True,
            showfliers=False,
            medianprops={"color": COLOURS[1]},
            meanprops={"marker": "D", "markersize": 3, "markerfacecolor": "black", "markeredgecolor": "black"},
        )
        axes.plot(places, places, ":", color="#888888", linewidth=0.8)
        axes.set_title(results.title(row), fontsize=9, loc="left")
        axes.set(xlabel="true label", ylabel="expected label")
    return figure, (
        "Expectation of the central model's predicted label by true label, all seeds together: median (line), mean "
        "(diamond), quartiles. On the dotted line it is right."
    )


# --- AdaFD, figures 1 and 6 ---


def domains(results: Results) -> tuple[Figure, str]:
    """t-SNE of the private texts' TF-IDF, coloured by site: how far the sites' language is apart."""
    from sklearn.decomposition import TruncatedSVD
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.manifold import TSNE

    by_domain = [row for row, config in results.table.rows.items() if config.data.partition.startswith("domain")]
    if not by_domain:
        raise NoPicture("The texts are not dealt by domain.")
    config = results.table.config(by_domain[0], results.table.settings.seeds[0])
    held = allocate(config)
    shares = {site.name: share for site, share in zip(config.sites, held.shares, strict=False)}
    each = max(1, MOST_POINTS // max(1, len(shares)))
    rows = np.concatenate([share[:each] for share in shares.values()])
    owners = np.repeat(list(shares), [len(share[:each]) for share in shares.values()])
    texts = [one if isinstance(one := held.splits.private.texts[row], str) else " ".join(one) for row in rows]
    matrix = TfidfVectorizer(max_features=WORDS).fit_transform(texts)
    if min(matrix.shape) < 12:
        raise NoPicture("There are too few texts or words for t-SNE.")
    reduced = TruncatedSVD(min(50, min(matrix.shape) - 1), random_state=0).fit_transform(matrix)
    flat = TSNE(perplexity=min(30.0, (len(rows) - 1) / 3), init="pca", random_state=0).fit_transform(reduced)
    figure, axes = figure_of(5.0, 4.4)
    for place, name in enumerate(shares):
        mine = flat[owners == name]
        axes.scatter(mine[:, 0], mine[:, 1], s=5, alpha=0.6, linewidth=0, color=COLOURS[place % 8], label=name)
    axes.set(xticks=[], yticks=[])
    axes.legend(markerscale=2, fontsize=8)
    return figure, (
        f"t-SNE of the private texts' TF-IDF ({WORDS:,} words at most), up to {each} texts a site, coloured by site, "
        "for the table's first seed. The more colours overlap, the more alike is the sites' language."
    )


def local_losses(results: Results) -> tuple[Figure, str]:
    """Draw the sites' training losses by round, and their score, for every row that trains sites."""
    losses = {
        row: [_site_losses(folder) for folder in folders_of(results, row) if _site_losses(folder)]
        for row in results.rows
    }
    losses = {row: runs for row, runs in losses.items() if runs}
    if not losses:
        raise NoPicture("No row's sites tell their training losses.")
    main = results.table.main
    score = Column(f"sites.{main.score}") if main is not None else None
    figure, (left, right) = grid_of(2, 3.6, 3.0, most=2)
    for row, runs in losses.items():
        _mean_curve(left, runs, label=results.title(row), **look(results, row))
        tested = [scores_by_round(folder, score) for folder in folders_of(results, row)] if score else []
        scored = [{float(number): value for number, value in run.items()} for run in tested if run]
        _mean_curve(right, scored, **look(results, row))
    left.set(xlabel="round", ylabel="training loss, mean of sites")
    right.set(xlabel="round", ylabel=score.title if score else "")
    for axes in (left, right):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.legend(loc="outside lower center", ncols=3)
    return figure, (
        "Left: the sites' mean loss on their own texts in the last local epoch of each round. Right: their mean score "
        "on the test texts. Mean over seeds."
    )


def _site_losses(folder: Path) -> Curve:
    told = by_round(folder, "local_losses", "sites")
    return {float(number): float(np.mean([losses[-1] for losses in sites.values()])) for number, sites in told.items()}


# --- FedID's confirmation bias ---


def pseudo_labels(results: Results) -> tuple[Figure, str]:
    """Draw how often the sites' pseudo-labels are right, pass by pass, and how large their largest class is."""
    right = {row: _passes(results, row, "pseudo_label_accuracy", float) for row in results.rows}
    largest = {row: _passes(results, row, "pseudo_labels", lambda told: float(told["largest"])) for row in results.rows}
    if not any(largest.values()):
        raise NoPicture("No row's method exchanges predictions.")
    panels = [("accuracy", right), ("share of the largest class", largest)]
    panels = [(name, by_row) for name, by_row in panels if any(by_row.values())]
    figure, grid = grid_of(len(panels), 3.6, 3.0, most=2)
    for place, (axes, (name, by_row)) in enumerate(zip(grid, panels, strict=True)):
        for row, runs in by_row.items():
            if runs:
                _mean_curve(axes, runs, label="" if place else results.title(row), **look(results, row))
        axes.set(xlabel="round", ylabel=name)
    figure.legend(loc="outside lower center", ncols=3)
    return figure, (
        "What the sites say of the public texts, pass by pass: how often the mean of their probabilities is right "
        "(where the public texts' labels are known), and the share of the class that it puts first most often. Mean "
        "over seeds."
    )


def _passes(results: Results, row: str, kind: str, of: Callable[..., float]) -> list[Curve]:
    runs = []
    for folder in folders_of(results, row):
        told = {(int(event["round"]), int(event["pass"])): of(event["together"]) for event in events(folder, kind)}
        most = {number: max(p for n, p in told if n == number) for number, _ in told}
        if told:
            runs.append({number - 1 + part / most[number]: value for (number, part), value in sorted(told.items())})
    return runs


def _mean_curve(axes: Axes, runs: list[Curve], **style: object) -> None:
    """Draw the mean over runs, at the places that all of them have."""
    places = sorted(set.intersection(*(set(run) for run in runs))) if runs else []
    if places:
        mean = np.mean([[run[place] for place in places] for run in runs], axis=0)
        axes.plot(places, mean, marker="o", markersize=2.5, linewidth=1.4, **style)  # type: ignore[arg-type]
