"""Tables of runs; table_file.py reads them from TOML."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, Field, field_validator

from fedstill.common.config import ConfigError, RunConfig, Section
from fedstill.common.config.files import check
from fedstill.common.data.tasks import load_task
from fedstill.experiments.compare.columns import COSTS, Column
from fedstill.experiments.compare.grid import Combination


class Claim(Section):
    """[claims.NAME]: a row that should be above another, asked of every table of the file that has both."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    says: str = Field(min_length=1)  # the claim in words
    first: str
    second: str | None = None  # by default each table's best baseline
    column: str | None = None  # by default the table's first score


class Settings(Section):
    """What a table shows, over which seeds; in a file with a [grid], of all its tables."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    title: str = Field(min_length=1)
    seeds: list[int] = Field(min_length=1)
    caption: str = ""
    columns: list[str] = Field(["central.accuracy"], min_length=1)  # the first one orders the rows
    baselines: list[str] = Field([])  # the other rows are tested against the best of them
    bounds: list[str] = Field([])  # shown, but not competing: neither best nor part of the order
    claims: dict[str, Claim] = Field({})  # what is tested over all tables of the file

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
            if not Column(key).is_known:
                raise ValueError(
                    f"{key!r} is no column; write central.SCORE, centralized.SCORE, sites.SCORE, sites.NAME.SCORE, "
                    f"alone.SCORE or own.NAME.SCORE, such as central.accuracy or "
                    f"central.accuracy@last5, or one of {', '.join(COSTS)}"
                )
        return columns


class TableConfig(Settings):
    """The settings of one table, with the paper's numbers."""

    paper: dict[str, float | str | dict[str, float]] = Field({})  # a row's number, or one a column; a caption

    @field_validator("paper")
    @classmethod
    def _only_the_caption_is_text(cls, paper: dict[str, Any]) -> dict[str, Any]:
        for row, value in paper.items():
            if isinstance(value, str) != (row == "caption"):
                raise ValueError(f"paper.{row}: a row has a number, or a number for each column; caption is a text")
        return paper


@dataclass(frozen=True)
class Table:
    """One table: its settings, and the run of each row, in the file's order."""

    name: str  # name of its run folder
    file: Path
    combination: Combination  # of its file's grid; empty where there is none
    settings: TableConfig
    titles: dict[str, str]
    rows: dict[str, RunConfig]

    @property
    def columns(self) -> list[Column]:
        """The columns shown."""
        return [Column(key) for key in self.settings.columns]

    @property
    def main(self) -> Column | None:
        """The first score: rows are ordered and tested by it."""
        return next((column for column in self.columns if column.is_score), None)

    def source(self, row: str | None = None) -> str:
        """The file, combination and row, as an error names them."""
        return source(self.file, self.combination, row)

    def title(self, row: str) -> str:
        """Return a row's title."""
        return self.titles[row]

    def config(self, row: str, seed: int) -> RunConfig:
        """Return a row's run with one of the seeds."""
        return self.rows[row].model_copy(update={"seed": seed})

    def paper(self, row: str, column: Column) -> float | None:
        """Return the paper's number; a single one belongs to the first score."""
        printed = self.settings.paper.get(row)
        if isinstance(printed, dict):
            return printed.get(column.key)
        return printed if isinstance(printed, float | int) and column == self.main else None

    def with_seeds(self, seeds: list[int]) -> Table:
        """Return the same table over other seeds."""
        values = {**self.settings.model_dump(), "seeds": seeds}
        return replace(self, settings=check(TableConfig, values, "--seeds"))


def source(file: Path, combination: Combination, row: str | None = None) -> str:
    """The file, combination and row, as an error names them."""
    parts = [str(file), *(f"{axis}={value}" for axis, value in combination.items())]
    return ", ".join(parts if row is None else [*parts, f"row {row}"])


def check_tasks(table: Table) -> None:
    """Load every task of the table once, so that an unknown or absent one fails before anything runs."""
    loaded = set()
    for row, config in table.rows.items():
        task = config.task.model_dump_json()
        if config.mixed or task in loaded:
            continue
        loaded.add(task)
        try:
            load_task(config.task)
        except (ValueError, OSError) as error:
            raise ConfigError(f"{table.source(row)}:\n  task: {error}") from None
