"""How a run deals its private texts to the sites, as a table and as a picture."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedstill.common.config import ConfigError, RunConfig
from fedstill.common.data.allocation import allocate
from fedstill.common.data.partitions import counts


@dataclass(frozen=True)
class Dealt:
    """Texts of each kind (a label or a domain) at each site."""

    title: str
    by: str
    sites: list[str]
    kinds: list[str]
    counts: NDArray[np.int64]

    def rows(self) -> list[dict[str, Any]]:
        """Return one row per site, with its sum."""
        return [
            {"site": site, **dict(zip(self.kinds, row.tolist(), strict=True)), "texts": int(row.sum())}
            for site, row in zip(self.sites, self.counts, strict=True)
        ]


def dealt(config: RunConfig, by: str = "label") -> Dealt:
    """Count what each site without its own files would get."""
    if config.mixed:
        raise ConfigError('task.name = "mixed": every site brings its own texts, and the run deals none')
    if by not in ("label", "domain"):
        raise ConfigError(f"--by {by}: write label or domain")
    sites = [site.name for site in config.sites if site.data is None]
    if not sites:
        raise ConfigError("sites: the run deals texts to no site; write a [[sites]] table without data of its own")
    held, data = allocate(config), config.data
    private = held.splits.private
    skewed = data.partition not in ("iid", "domain")
    rule = f"{data.partition}, alpha {data.alpha:g}" if skewed else data.partition
    title = f"{config.task.name}: {len(private)} private texts over {len(sites)} sites, {rule}, seed {config.seed}"
    if by == "domain":
        if private.domains is None:
            raise ConfigError(f"--by domain: the texts of task {held.task.name} have no domains; write --by label")
        kinds = sorted(set(private.domains))
        return Dealt(title, by, sites, kinds, counts(private.domains, held.shares, kinds))
    table = counts(np.asarray(private.labels), held.shares, range(len(held.task.labels)))
    return Dealt(title, by, sites, list(held.task.labels), table)


def draw(shares: Dealt, path: Path) -> None:
    """Draw one bar per site, stacked by kind, with numbers where they fit."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    height = 1.6 + 0.34 * len(shares.sites)
    figure, axes = pyplot.subplots(figsize=(9, height), layout="constrained")
    colours = pyplot.get_cmap("tab10" if len(shares.kinds) <= 10 else "tab20").colors  # type: ignore[attr-defined]
    left, widest = np.zeros(len(shares.sites)), shares.counts.sum(axis=1).max(initial=1)
    for number, kind in enumerate(shares.kinds):
        column = shares.counts[:, number]
        bars = axes.barh(shares.sites, column, left=left, label=kind, color=colours[number % len(colours)])
        shown = [str(value) if value > 0.05 * widest else "" for value in column]
        axes.bar_label(bars, shown, label_type="center", color="white", fontsize=8)
        left += column
    axes.invert_yaxis()
    axes.set_xlabel("private texts")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(shares.title, fontsize=10, loc="left")
    figure.legend(title=shares.by, loc="outside right upper", frameon=False, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        figure.savefig(path, dpi=150)
    except ValueError as error:
        raise ConfigError(f"{path}: {error}; give it an ending such as .png") from None
    finally:
        pyplot.close(figure)
