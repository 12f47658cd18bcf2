"""Several data sets as one task, each a domain (or each of its genres): Confident Sinkhorns' NLI and ERC."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from fedstill.common.data.splits import Pools, TextSet
from fedstill.common.data.tasks.library import Known
from fedstill.common.data.tasks.task import INFERENCE_TRIANGLE, VALENCE_AROUSAL, Task, TaskError

if TYPE_CHECKING:
    from fedstill.common.config import TaskConfig

PARTS = {"nli": ("mnli", "snli", "anli"), "emotions": ("dailydialog", "meld", "iemocap")}
OWN_DOMAINS = ("mnli",)  # its genres are domains; of the others each data set is one
QUARTERED = (
    "dailydialog",
)  # Confident Sinkhorns has two quarters at sites, one at the server, and one as public texts
JOINED = {
    "nli": Task(
        "nli", tuple(INFERENCE_TRIANGLE), title="MNLI by genre, SNLI and ANLI together",
        text_columns=("premise", "hypothesis"), domain_column="domain", coordinates=tuple(INFERENCE_TRIANGLE.values()),
    ),
    "emotions": Task(
        "emotions", tuple(VALENCE_AROUSAL), "f1_macro", "DailyDialog, MELD and IEMOCAP together",
        domain_column="domain", coordinates=tuple(VALENCE_AROUSAL.values()),
    ),
}  # fmt: skip


def joined(config: TaskConfig, known: Mapping[str, Known]) -> Pools:
    """Concatenate the parts that task.parts names, or all."""
    possible = PARTS[config.name]
    wanted = config.parts or list(possible)
    unknown = [name for name in wanted if name not in possible]
    if unknown:
        raise TaskError(f"task.parts names {', '.join(unknown)}; {config.name} has: {', '.join(possible)}")
    pools = {}
    for name in possible:
        if name in wanted:
            try:
                pools[name] = _named(known[name].load(config), name)
            except TaskError as error:
                others = [part for part in wanted if part != name]
                cure = f"\nOr leave it out: task.parts = {others}" if others else ""
                raise TaskError(f"{error}{cure}") from error
    tests = [pool.test for pool in pools.values() if pool.test is not None]
    dropped = {f"{why}, {name}": count for name, pool in pools.items() for why, count in pool.dropped.items()}
    return Pools(behind([pool.train for pool in pools.values()]), behind(tests) if tests else None, dropped=dropped)


def _named(pools: Pools, name: str) -> Pools:
    return replace(
        pools, train=_domain(pools.train, name), test=None if pools.test is None else _domain(pools.test, name)
    )


def _domain(texts: TextSet, name: str) -> TextSet:
    if texts.domains is not None and name in OWN_DOMAINS:
        return texts
    if name in QUARTERED:
        return replace(texts, domains=tuple(f"{name}-{1 + 4 * n // len(texts)}" for n in range(len(texts))))
    return replace(texts, domains=(name,) * len(texts))


def behind(sets: list[TextSet]) -> TextSet:
    """Concatenate text sets with labels and domains."""
    return TextSet(
        tuple(text for part in sets for text in part.texts),
        np.concatenate([np.asarray(part.labels) for part in sets]),
        tuple(domain for part in sets for domain in part.domains or ()),
    )
