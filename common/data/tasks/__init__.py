"""Tasks: where the texts come from, their columns and labels, and how answers are scored."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from fedstill.common.catalogue import Catalogue
from fedstill.common.data.splits import Pools, TextSet
from fedstill.common.data.tasks.dialogues import DIALOGUES
from fedstill.common.data.tasks.film import FILM_REVIEWS, film_reviews
from fedstill.common.data.tasks.glue import GLUE
from fedstill.common.data.tasks.hub import hub_reachable
from fedstill.common.data.tasks.inference import INFERENCE
from fedstill.common.data.tasks.joined import JOINED, PARTS, joined
from fedstill.common.data.tasks.library import Known
from fedstill.common.data.tasks.own import from_files, from_hub, points_of
from fedstill.common.data.tasks.passages import PASSAGES, Passages
from fedstill.common.data.tasks.reviews import REVIEWS
from fedstill.common.data.tasks.rows import Row, read_rows, text_set
from fedstill.common.data.tasks.scores import domain_scores, scores, semantic_distance, task_scores
from fedstill.common.data.tasks.superglue_tasks import SUPERGLUE
from fedstill.common.data.tasks.task import (
    INFERENCE_TRIANGLE,
    METRICS,
    VALENCE_AROUSAL,
    Coordinates,
    Task,
    TaskError,
    on_a_line,
)

if TYPE_CHECKING:
    from fedstill.common.config import TaskConfig

__all__ = [
    "INFERENCE_TRIANGLE",
    "KNOWN",
    "METRICS",
    "SITE_SETS",
    "TASKS",
    "VALENCE_AROUSAL",
    "Coordinates",
    "Known",
    "Row",
    "Task",
    "TaskError",
    "domain_scores",
    "film_reviews",
    "hub_reachable",
    "load_task",
    "on_a_line",
    "read_rows",
    "scores",
    "semantic_distance",
    "site_kind",
    "site_rows",
    "source_of",
    "task_scores",
]  # fmt: skip

KNOWN: Catalogue[Known] = Catalogue(
    "fedstill.tasks", {known.task.name: known for known in [*GLUE, *SUPERGLUE, *INFERENCE, *REVIEWS, *DIALOGUES]}
)


class Tasks(Mapping[str, Task]):
    """Every task that a run can name: the built-in ones, and those of installed packages."""

    own: ClassVar[dict[str, Task]] = {"film-reviews": FILM_REVIEWS, **JOINED}

    def __getitem__(self, name: str) -> Task:
        return self.own[name] if name in self.own else KNOWN[name].task

    def __iter__(self) -> Iterator[str]:
        yield "film-reviews"
        yield from KNOWN
        yield from JOINED

    def __len__(self) -> int:
        return len(self.own) + len(KNOWN)

    def __contains__(self, name: object) -> bool:
        return name in self.own or name in KNOWN


TASKS = Tasks()
SITE_SETS: Mapping[str, Passages] = {source.name: source for source in PASSAGES}


def load_task(config: TaskConfig) -> tuple[Task, Pools]:
    """Load the configured task with its texts; public texts come from another task if the configuration asks for it."""
    task, pools = _load(config)
    if config.second_test is not None:
        pools = replace(pools, second=_second_test(task, config))
    if config.public_task is None:
        if config.public is not None and pools.public is None:
            columns = replace(task, text_columns=tuple(config.text), domain_column=None)
            pools = replace(
                pools, public=text_set(list(read_rows(config.public)), columns, str(config.public), False)[0]
            )
        return task, pools
    other, texts = _load(config.model_copy(update={"name": config.public_task, "public_task": None, "parts": None}))
    if len(other.text_columns) != len(task.text_columns):
        raise TaskError(
            f"task.public_task = {other.name!r} has {len(other.text_columns)} texts a row and {task.name} "
            f"{len(task.text_columns)}; name a task that has as many"
        )
    labels = texts.train.labels if other.labels == task.labels else None  # to measure with, in an experiment
    return task, replace(pools, public=replace(texts.train, labels=labels, domains=None))


def _second_test(task: Task, config: TaskConfig) -> TextSet:
    """Return the test texts of another task with the same labels."""
    other, texts = _load(config.model_copy(update={"name": str(config.second_test), "second_test": None}))
    if other.labels != task.labels or texts.test is None:
        why = "has no test texts of its own" if other.labels == task.labels else f"has labels {list(other.labels)}"
        raise TaskError(f"task.second_test = {other.name!r} {why}; name a task that is tested as {task.name} is")
    return texts.test


def _load(config: TaskConfig) -> tuple[Task, Pools]:
    if config.name in TASKS:
        # Each party may give its own words to a text-to-text model; labels and columns are the task's.
        task = replace(TASKS[config.name], metric=config.metric or TASKS[config.name].metric)
        task = replace(task, label_words=tuple(config.label_words)) if config.label_words else task
        task = replace(task, prompt=config.prompt) if config.prompt else task
        task = replace(task, coordinates=points_of(config)) if config.coordinates else task
        if config.name in JOINED:
            return task, joined(config, KNOWN)
        return task, film_reviews() if config.name == "film-reviews" else KNOWN[config.name].load(config)
    if config.name == "files":
        return from_files(config)
    if config.name == "hub":
        return from_hub(config)
    if config.name == "superglue":
        from fedstill.common.data.tasks import superglue

        return superglue.load(config)
    if config.name in SITE_SETS:
        raise TaskError(
            f"task.name = {config.name!r} is no classification that sites share; a site has it as its own: "
            f'set task.name = "mixed" and, in the site\'s [task], name = "{config.name}"'
        )
    raise TaskError(unknown("task.name", config.name, [*TASKS, "superglue", "files", "hub", "mixed"]))


def unknown(key: str, name: str, choices: list[str]) -> str:
    """Return the error message for a name that is none of the choices."""
    near = difflib.get_close_matches(name, choices, n=3)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    return f"{key} = {name!r} is not known; {hint}choose one of: {', '.join(choices)}"


def site_kind(name: str) -> str:
    """Return the kind of task that a known data set is for a site."""
    if name in SITE_SETS:
        return SITE_SETS[name].kind
    if name in KNOWN and len(KNOWN[name].task.text_columns) == 1:
        return "classification"
    single = [one for one, known in KNOWN.items() if len(known.task.text_columns) == 1]
    raise TaskError(unknown("task.name", name, [*SITE_SETS, *single]))


def site_rows(name: str, folder: Path | None) -> tuple[list[Row], list[Row]]:
    """Return a known data set's training and test rows, with the columns of its kind."""
    if name in SITE_SETS:
        return SITE_SETS[name].load(folder)
    from fedstill.common.config import TaskConfig

    task, pools = _load(TaskConfig(name=name, folder=folder))
    both = [pool for pool in (pools.train, pools.test) if pool is not None]
    rows: list[list[Row]] = [
        [
            {"text": text, "label": task.labels[label]}
            for text, label in zip(pool.texts, np.asarray(pool.labels), strict=True)
        ]
        for pool in both
    ]
    return rows[0], rows[1] if len(rows) > 1 else []


def source_of(name: str, folder: Path | None = None) -> str | None:
    """Return what would be read for a task without the hub; None if there is nothing."""
    if name == "film-reviews":
        return "built in"
    if name in JOINED:
        sources = {part: KNOWN[part].source(folder) for part in PARTS[name]}
        return "; ".join(f"{part}: {where}" for part, where in sources.items() if where) or None
    return (SITE_SETS.get(name) or KNOWN[name]).source(folder)
