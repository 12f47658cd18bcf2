"""Tasks without an entry here: any files, any hub data set."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedstill.common.data.splits import Pools
from fedstill.common.data.tasks.hub import hub_parts
from fedstill.common.data.tasks.rows import Row, labels_in, read_rows, text_set
from fedstill.common.data.tasks.task import Coordinates, Task, TaskError, points_by_name

if TYPE_CHECKING:
    from fedstill.common.config import TaskConfig


def from_files(config: TaskConfig) -> tuple[Task, Pools]:
    """Build a task from files with named columns."""
    if config.train is None:
        raise TaskError('task.name = "files" needs task.train, the file with the labelled texts')
    rows = {"train": list(read_rows(config.train))}
    if config.test is not None:
        rows["test"] = list(read_rows(config.test))
    if config.public is not None:
        rows["public"] = list(read_rows(config.public))
    paths = {"train": str(config.train), "test": str(config.test), "public": str(config.public)}
    return _assemble(config, rows, paths, names=None)


def from_hub(config: TaskConfig) -> tuple[Task, Pools]:
    """Build a task from any hub data set."""
    if not config.hub:
        raise TaskError('task.name = "hub" needs task.hub, the name of the dataset, such as "nyu-mll/glue"')
    parts = hub_parts(config.hub, config.hub_config)
    splits = {"train": config.train_split, "test": config.test_split}
    for key, split in splits.items():
        if split not in parts:
            raise TaskError(
                f"dataset {config.hub} has no split {split!r}; set task.{key}_split to one of: {', '.join(parts)}"
            )
    feature = parts[config.train_split].features.get(config.label)
    rows = {key: list(parts[split]) for key, split in splits.items()}
    return _assemble(
        config, rows, {key: f"{config.hub}/{splits[key]}" for key in rows}, getattr(feature, "names", None)
    )


def _assemble(
    config: TaskConfig, rows: dict[str, list[Row]], paths: dict[str, str], names: Sequence[str] | None
) -> tuple[Task, Pools]:
    labels = tuple(map(str, config.labels or names or labels_in(rows["train"], config.label, paths["train"])))
    task = Task(
        name=config.name,
        labels=labels,
        metric=config.metric or "accuracy",
        title=config.hub or Path(paths["train"]).name,
        text_columns=tuple(config.text),
        label_column=config.label,
        domain_column=config.domain,
        label_words=tuple(config.label_words or ()),
        prompt=config.prompt or "",
        coordinates=points_of(config) or points_by_name(labels),
    )
    sets = {key: text_set(rows[key], task, paths[key], labelled=key != "public") for key in rows}
    dropped = {f"blank, {key}": count for key, (_, count) in sets.items()}
    return task, Pools(**{key: texts for key, (texts, _) in sets.items()}, dropped=dropped)


def points_of(config: TaskConfig) -> Coordinates:
    """Return the configured coordinates of the labels."""
    return tuple(map(tuple, config.coordinates or ()))
