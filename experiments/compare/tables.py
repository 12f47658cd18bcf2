"""Tables: a folder of TOML files, one a row, with a table.toml that says what is shown, over which seeds."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, Field, field_validator

from fedstill.common.config import NAME, ConfigError, RunConfig, Section
from fedstill.common.config.files import check, load_run, read_values
from fedstill.common.data.tasks import load_task
from fedstill.strategies import find_method

HEAD = "table.toml"
NO_ROWS = (HEAD, "base.toml")
WHOSE = {
    "central": "central model",
    "centralized": "all texts in one place",
    "sites": "mean of sites, after",
    "alone": "mean of sites, alone",
    "own": "by the site's own task",  # of mixed tasks: own.NAME.SCORE, the mean of the sites NAME or NAME-1, NAME-2 ...
}
COSTS = {"bytes_up": "sent, a site", "bytes_down": "received, a site", "seconds": "seconds, wall clock"}


@dataclass(frozen=True)
class Column:
    """What a column shows of a run: a score of the central model, of the sites (or of one), or a cost."""

    key: str

    @property
    def is_score(self) -> bool:
        """Whether rows compete in it."""
        return self.key not in COSTS

    @property
    def whose(self) -> str:
        """Whose score it is."""
        return self.key.partition(".")[0]

    @property
    def site(self) -> str | None:
        """The one site whose score it is, if it is one's alone."""
        return self.key.partition(".")[2].rpartition(".")[0] or None

    @property
    def score(self) -> str:
        """The score's name, as the task gives it."""
        return self.key.rpartition(".")[2]

    @property
    def lower_is_better(self) -> bool:
        """Distances and costs."""
        return not self.is_score or self.score == "semantic_distance"

    @property
    def title(self) -> str:
        """The column's head."""
        if not self.is_score:
            return COSTS[self.key]
        who = f"{self.site}{', alone' if self.whose == 'alone' else ''}" if self.site else WHOSE[self.whose]
        return f"{self.score.replace('_', ' ')}, {who}"


class TableConfig(Section):
    """table.toml. Rows are named as their files, without .toml."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    title: str = Field(min_length=1)
    seeds: list[int] = Field(min_length=1)
    caption: str = ""
    columns: list[str] = Field(["central.accuracy"], min_length=1)  # the first is the one that the order goes by
    baselines: list[str] = Field([])  # the best of them is what the other rows are tested against
    bounds: list[str] = Field([])  # shown, but no competitors: neither best nor part of the order
    order: list[str] = Field([])  # of rows; those that are not named follow by name
    titles: dict[str, str] = Field({})  # how rows are called, if not by their file
    paper: dict[str, float | str | dict[str, float]] = Field({})  # a row's number, or one a column; a caption

    @field_validator("seeds")
    @classmethod
    def _each_seed_once(cls, seeds: list[int]) -> list[int]:
        if any(seed < 0 for seed in seeds) or len(set(seeds)) < len(seeds):
            raise ValueError("seeds are different whole numbers from 0, such as [1, 2, 3]")
        return seeds

    @field_validator("columns")
    @classmethod
    def _columns_are_known(cls, columns: list[str]) -> list[str]:
        for key in columns:
            whose, _, rest = key.partition(".")
            of_one = "." in rest
            known = (
                whose in WHOSE and rest and (of_one if whose == "own" else not of_one or whose in ("sites", "alone"))
            )
            if key not in COSTS and not known:
                raise ValueError(
                    f"{key!r} is no column; write central.SCORE, centralized.SCORE, sites.SCORE, sites.NAME.SCORE, "
                    f"alone.SCORE or own.NAME.SCORE, such as central.accuracy, or one of {', '.join(COSTS)}"
                )
        return columns

    @field_validator("paper")
    @classmethod
    def _only_the_caption_is_text(cls, paper: dict[str, Any]) -> dict[str, Any]:
        for row, value in paper.items():
            if isinstance(value, str) != (row == "caption"):
                raise ValueError(f"paper.{row}: a row has a number, or a number for each column; caption is a text")
        return paper


@dataclass(frozen=True)
class Table:
    """A table as it was read: its settings, and the run of each row."""

    name: str
    folder: Path
    settings: TableConfig
    rows: dict[str, RunConfig]

    @property
    def columns(self) -> list[Column]:
        """What is shown."""
        return [Column(key) for key in self.settings.columns]

    @property
    def main(self) -> Column | None:
        """The first score: what rows are ordered and tested by."""
        return next((column for column in self.columns if column.is_score), None)

    def title(self, row: str) -> str:
        """What a row is called."""
        return self.settings.titles.get(row, row)

    def config(self, row: str, seed: int) -> RunConfig:
        """The run of a row with one of the seeds."""
        return self.rows[row].model_copy(update={"seed": seed})

    def paper(self, row: str, column: Column) -> float | None:
        """The paper's number; a single one belongs to the first score."""
        found = self.settings.paper.get(row)
        if isinstance(found, dict):
            return found.get(column.key)
        return found if isinstance(found, float | int) and column == self.main else None

    def with_seeds(self, seeds: list[int]) -> Table:
        """The same table over other seeds."""
        values = {**self.settings.model_dump(), "seeds": seeds}
        return replace(self, settings=check(TableConfig, values, "--seeds"))


def find_tables(folder: Path) -> list[Path]:
    """The folder itself if it is a table, else the tables right inside it."""
    if not folder.is_dir():
        raise ConfigError(f"{folder}: is no folder; give one with a {HEAD} and a TOML file a row, or with such folders")
    if (folder / HEAD).is_file():
        return [folder]
    found = sorted(entry for entry in folder.iterdir() if (entry / HEAD).is_file())
    if not found:
        raise ConfigError(
            f"{folder}: there is no {HEAD} in it, nor in a folder inside it; write one with title and seeds"
        )
    return found


def read_table(folder: Path) -> Table:
    """A table with every row checked; errors name the file, the key and the cure."""
    head = folder / HEAD
    settings = check(TableConfig, read_values(head)[0], str(head))
    files = sorted(path for path in folder.glob("*.toml") if path.name not in NO_ROWS)
    if not files:
        raise ConfigError(f"{folder}: the table has no rows; write a TOML file for each, beside {HEAD}")
    for path in files:
        if not re.fullmatch(NAME, path.stem):
            raise ConfigError(f"{path}: a row's file is called by letters, digits and . _ - only")
    rows = {path.stem: _read_row(path) for path in files}
    for key in ("baselines", "bounds", "order"):
        _check_names(head, key, getattr(settings, key), rows)
    _check_names(head, "titles", settings.titles, rows)
    _check_names(head, "paper", [row for row in settings.paper if row != "caption"], rows)
    for row, value in settings.paper.items():
        if isinstance(value, dict):
            _check_names(head, f"paper.{row}", value, settings.columns, "column of this table")
    ordered = [*settings.order, *(row for row in rows if row not in settings.order)]
    return Table(_name(folder), folder, settings, {row: rows[row] for row in ordered})


def _read_row(path: Path) -> RunConfig:
    config = load_run(path)
    try:
        find_method(config.method)
    except ConfigError as error:
        raise ConfigError(f"{path}:\n  {error}") from None
    if not config.sites:
        raise ConfigError(
            f"{path}:\n  sites: the row names no sites; write [[sites]] tables, here or in what it extends"
        )
    return config


def check_tasks(table: Table) -> None:
    """Load every task of the table once, so that an unknown or absent one is known before anything runs."""
    seen = set()
    for row, config in table.rows.items():
        told = config.task.model_dump_json()
        if config.mixed or told in seen:
            continue
        seen.add(told)
        try:
            load_task(config.task)
        except (ValueError, OSError) as error:
            raise ConfigError(f"{table.folder / row}.toml:\n  task: {error}") from None


def _check_names(head: Path, key: str, names: Iterable[str], known: Iterable[str], what: str = "row") -> None:
    there = list(known)
    for name in names:
        if name not in there:
            near = difflib.get_close_matches(name, there, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(there)}"
            raise ConfigError(f"{head}:\n  {key}: {name!r} is no {what}; {hint}")


def _name(folder: Path) -> str:
    """The path below `experiments`, such as fedid-small-ablation; elsewhere the folder's own name."""
    parts = folder.resolve().parts
    if "experiments" in parts[:-1]:
        parts = parts[len(parts) - parts[::-1].index("experiments") :]
        return "-".join(parts)
    return parts[-1]
