"""Each party's share of a run's texts, computed from the run's configuration alone, the same way everywhere."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from fedstill.common.config import RunConfig, SiteConfig, TaskConfig
from fedstill.common.data.partitions import partition
from fedstill.common.data.splits import DataError, Pools, Rows, Splits, TextSet, make_splits, public_texts
from fedstill.common.data.tasks import TASKS, Task, TaskError, load_task


@dataclass(frozen=True)
class Allocation:
    """The run's task and splits, and the private rows of each site that the run deals texts to."""

    task: Task
    splits: Splits
    shares: list[NDArray[np.int64]]


def allocate(config: RunConfig) -> Allocation:
    """Split the run's texts and deal them to the sites."""
    global _latest
    latest = _latest
    if latest is None or latest[0] is not config:
        latest = _latest = (config, _allocate(config))
    return latest[1]


_latest: tuple[RunConfig, Allocation] | None = None  # to write down 512 sites for each of them takes longer than a swap


def _allocate(config: RunConfig) -> Allocation:
    dealt = [site.model_dump(mode="json", include={"name", "data"}) for site in config.sites]
    settings = config.model_dump(mode="json", include={"seed", "task", "data"})
    return _deal(json.dumps({**settings, "sites": dealt}))


@lru_cache(maxsize=2)
def _deal(settings: str) -> Allocation:
    config = RunConfig.model_validate_json(settings)
    task, pools = load_task(config.task)
    splits = make_splits(pools, config.data, config.seed)
    dealt = [site for site in config.sites if site.data is None]
    data = config.data
    shares = (
        partition(splits.private, len(dealt), data.partition, data.alpha, config.seed, data.minimum) if dealt else []
    )
    rows = {site.name: share for site, share in zip(dealt, shares, strict=True)}
    for name, noise in (data.label_noise or {}).items():
        rng = np.random.default_rng([config.seed, 6, *name.encode()])
        splits = replace(splits, private=with_wrong_labels(splits.private, rows[name], noise, task, rng))
    return Allocation(task, splits, shares)


def with_wrong_labels(texts: TextSet, rows: Rows, noise: float, task: Task, rng: np.random.Generator) -> TextSet:
    """Return the texts, a share of these rows with another class, of those that a text of their domain can have."""
    if texts.labels is None:
        raise DataError("data.label_noise changes labels, and the private texts have none; take it out")
    labels, classes_of = texts.labels.copy(), dict(task.choices)
    for row in rng.choice(rows, round(noise * len(rows)), replace=False):
        domain = texts.domains[row] if texts.domains is not None else ""
        classes = np.array(classes_of.get(domain, range(len(task.labels))))
        labels[row] = rng.choice(classes[classes != labels[row]])
    return replace(texts, labels=labels)


@dataclass(frozen=True)
class SiteTexts:
    """A site's view: its private texts, the public ones, and what it is tested on."""

    task: Task
    private: TextSet
    public: TextSet
    test: TextSet


def site_texts(config: RunConfig, site: SiteConfig) -> SiteTexts:
    """Return one site's texts: its own files if it has any, else its share of the run's."""
    if site.data is not None:
        return _own_texts(config, site)
    held = allocate(config)
    dealt = [entry.name for entry in config.sites if entry.data is None]
    if site.name not in dealt:
        raise DataError(
            f"site {site.name!r} has no data of its own and is not among the run's sites: {', '.join(dealt)}"
        )
    private = held.splits.private.select(held.shares[dealt.index(site.name)])
    return SiteTexts(held.task, private, held.splits.public, held.splits.test)


def _own_texts(config: RunConfig, site: SiteConfig) -> SiteTexts:
    """Read the files on the site's disk; a tenth of the private texts is held out as the site's own test."""
    assert site.data is not None
    if config.task.name == "files" and config.task.labels is None:
        raise TaskError("a run whose sites bring their own files must list task.labels, so that all number them alike")
    known = TASKS.get(config.task.name)
    labels = config.task.labels or list(known.labels if known is not None else allocate(config).task.labels)
    settings = TaskConfig(
        name="files",
        train=site.data.private,
        public=site.data.public,
        text=site.data.text,
        label=site.data.label,
        labels=labels,
        label_words=config.task.label_words,
        prompt=config.task.prompt,
        metric=config.task.metric or (known.metric if known is not None else None),
        coordinates=config.task.coordinates,
    )
    if known is not None and settings.coordinates is None:
        settings = settings.model_copy(update={"coordinates": [list(point) for point in known.coordinates] or None})
    task, pools = load_task(settings)
    held_out = make_splits(Pools(pools.train), config.data.model_copy(update=_own_sizes(len(pools.train))), config.seed)
    public = (
        allocate(config).splits.public if pools.public is None else public_texts(pools.public, config.data, config.seed)
    )
    return SiteTexts(task, held_out.private, public, held_out.test)


def _own_sizes(texts: int) -> dict[str, int]:
    test = max(1, texts // 10)
    return {"private": texts - test, "test": test, "public": 0, "labelled": 0}
