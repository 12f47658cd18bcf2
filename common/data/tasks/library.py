"""Known data sets: where to find their files or hub copies, and how rows become texts."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from fedstill.common.data.splits import Pools, TextSet
from fedstill.common.data.tasks.hub import hub_parts
from fedstill.common.data.tasks.rows import Row, read_rows, text_set
from fedstill.common.data.tasks.task import Task, TaskError

if TYPE_CHECKING:
    from fedstill.common.config import TaskConfig

ROOT = "FEDSTILL_DATA"  # the folder searched for data sets when task.folder names none


@dataclass(frozen=True)
class Hub:
    """A copy on the hub; `revision` is for script-based data sets, whose converted files are on another branch."""

    name: str
    config: str | None = None
    train: tuple[str, ...] = ("train",)
    test: tuple[str, ...] = ("validation",)
    revision: str | None = None


@dataclass(frozen=True)
class Files:
    """The usual files: folders under the data folder, and the patterns of each part; the first match counts."""

    folders: tuple[str, ...]
    train: tuple[str, ...]
    test: tuple[str, ...]

    def find(self, folder: Path | None) -> dict[str, list[Path]]:
        """Return the files of each part; missing parts are left out, and a test part alone serves as training part."""
        places = [folder / name for name in ("", *self.folders)] if folder is not None else []
        root = os.environ.get(ROOT)
        places += [Path(root) / name for name in self.folders] if root and folder is None else []
        fallbacks: list[dict[str, list[Path]]] = []
        for place in places:
            parts = {"train": _first(place, self.train), "test": _first(place, self.test)}
            if parts["train"]:
                return {name: paths for name, paths in parts.items() if paths}
            fallbacks += [{"train": parts["test"]}] if parts["test"] else []
        return fallbacks[0] if fallbacks else {}


def _first(place: Path, patterns: Iterable[str]) -> list[Path]:
    for pattern in patterns:
        paths = sorted(path for path in place.glob(pattern) if path.is_file()) if place.is_dir() else []
        if paths:
            return paths
    return []


Shape = Callable[[Iterable[Row], "TaskConfig"], Iterator[Row]]
Read = Callable[[Path], Iterable[Row]]


@dataclass(frozen=True)
class Known:
    """A data set by name: its task, its files, its hub copy, and where to get the original."""

    task: Task
    files: Files = Files((), (), ())
    home: str = "an installed package"
    hub: Hub | None = None
    read: Read = read_rows
    shape: Shape | None = None  # raw rows to rows with the task's columns; by default the columns under other names
    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # column -> its names in files
    words: Mapping[str, str] = field(default_factory=dict)  # label in files -> label
    skip: frozenset[str] = frozenset()  # labels whose rows are skipped
    builtin: Callable[[], Iterable[Row]] | None = None  # rows that come with an installed package

    def source(self, folder: Path | None = None) -> str | None:
        """Return what would be read, or None if nothing is available without the hub."""
        parts = self.files.find(folder)
        if parts:
            return ", ".join(f"{part}: {_listed(paths)}" for part, paths in parts.items())
        return "built in" if self.builtin is not None and folder is None else None

    def load(self, config: TaskConfig) -> Pools:
        """Load the texts from task.folder or the data folder, from a package, or from the hub."""
        parts = self.files.find(config.folder)
        if parts:
            raw = {name: [row for path in paths for row in self._read(path)] for name, paths in parts.items()}
            return self._pools(raw, {name: _listed(paths) for name, paths in parts.items()}, config)
        if self.builtin is not None and config.folder is None:
            return self._pools({"train": list(self.builtin())}, {"train": "the installed package"}, config)
        if config.folder is not None or self.hub is None:
            raise TaskError(self._absent(config.folder))
        try:
            hub_rows = hub_parts(self.hub.name, self.hub.config, self.hub.revision)
        except TaskError as error:
            raise TaskError(f"{self._absent(None)}\n{error}") from error
        splits = {"train": self.hub.train, "test": self.hub.test}
        rows: dict[str, list[Row]] = {
            part: [dict(row) for name in names for row in hub_rows[name]] for part, names in splits.items()
        }
        return self._pools(rows, {part: f"{self.hub.name}/{'+'.join(names)}" for part, names in splits.items()}, config)

    def _read(self, path: Path) -> Iterable[Row]:
        for row in self.read(path):
            yield {"file": path.name, "folder": path.parent.name, **row}

    def _pools(self, raw: Mapping[str, list[Row]], paths: Mapping[str, str], config: TaskConfig) -> Pools:
        sets: dict[str, TextSet] = {}
        dropped: dict[str, int] = {}
        for part, raw_rows in raw.items():
            rows = list((self.shape or self._columns)(raw_rows, config))
            for row in rows[:1]:
                absent = [column for column in (*self.task.text_columns, self.task.label_column) if column not in row]
                if absent:
                    raise TaskError(
                        f"{paths[part]}: no column for {', '.join(absent)} of {self.task.name} in it; the usual files "
                        f"are needed: {self.home}"
                    )
            kept = [row for row in rows if _label_of(row, self.task.label_column) not in self.skip]
            dropped[f"label left out, {part}"] = len(rows) - len(kept)
            task = self.task
            if task.domain_column is not None and kept and task.domain_column not in kept[0]:
                task = replace(task, domain_column=None)
            sets[part], dropped[f"blank, {part}"] = text_set(kept, task, paths[part])
        return Pools(**sets, dropped={why: count for why, count in dropped.items() if count})

    def _columns(self, rows: Iterable[Row], config: TaskConfig) -> Iterator[Row]:
        wanted = [*self.task.text_columns, self.task.label_column]
        wanted += [self.task.domain_column] if self.task.domain_column else []
        for row in rows:
            columns = {}
            for column in wanted:
                for name in self.names.get(column, (column,)):
                    if name in row:
                        columns[column] = row[name]
                        break
            label = str(columns.get(self.task.label_column))
            yield {**columns, self.task.label_column: self.words.get(label, label)} if label != "None" else columns

    def _absent(self, folder: Path | None) -> str:
        """Describe what was looked for, where to get it, and which key to set."""
        name, files = self.task.name, self.files
        looked = str(folder) if folder is not None else os.environ.get(ROOT) or f"${ROOT}, which is not set"
        wanted = " or ".join((*files.train, *files.test))
        hub = (
            f", or on the hub: {self.hub.name}" + (f" ({self.hub.config})" if self.hub.config else "")
            if self.hub
            else ""
        )
        return (
            f"task {name}: its files are not there. Looked in {looked} (and in {', '.join(files.folders)} under it) "
            f"for {wanted}. Get them from {self.home}{hub}; then set task.folder to their folder, or {ROOT} to the "
            "folder that holds all data sets"
        )


def _label_of(row: Row, column: str) -> str:
    """Return a row's label; empty if the row was cut short."""
    label = row.get(column)
    return "" if label is None else str(label)


def _listed(paths: list[Path]) -> str:
    return str(paths[0]) if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"
