"""A table's TOML file: what all rows share, what each changes, and a grid if it stands for a family of tables."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from fedstill.common.config import NAME, ConfigError, RunConfig
from fedstill.common.config.files import check, merged, read_merged_values, read_values, resolve_run
from fedstill.experiments.compare import grid
from fedstill.experiments.compare.columns import Column
from fedstill.experiments.compare.grid import Combination
from fedstill.experiments.compare.tables import Settings, Table, TableConfig, source
from fedstill.strategies import find_method

Values = dict[str, Any]


class Row(BaseModel):
    """[rows.NAME]: how the row is shown, and every key of a run that it changes."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)

    title: str | None = None  # by default the row's name
    extends: str | None = None  # another row of the file
    only: list[str] = Field([])  # the combinations that have the row, such as "task=sst2"; all if none is named


class AxisValue(BaseModel):
    """[grid.AXIS.VALUE]: display settings of its tables, and every key of a run that it changes."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)

    title: str | None = None  # what {axis} stands for; by default the value itself
    caption: str | None = None
    seeds: list[int] | None = None
    columns: list[str] | None = None
    baselines: list[str] | None = None
    bounds: list[str] | None = None


class Contents(Settings):
    """The keys of a table's file. Titles and captions may hold {axis}."""

    name: str | None = Field(None, pattern=f"^{NAME}$")  # of the tables' run folders; by default the file's path
    only: list[str] = Field([])  # combinations, such as "task=sst2,alpha=1"; all if none is named
    base: Values = Field({})  # the run that every row starts from
    rows: dict[str, Row] = Field({})
    grid: dict[str, dict[str, AxisValue]] = Field({})
    paper: Values = Field({})


@dataclass(frozen=True)
class TableFile:
    """A file as read; each combination of its grid makes a table."""

    path: Path
    contents: Contents

    @property
    def combinations(self) -> list[Combination]:
        """The combinations, in the file's order."""
        return [
            combination
            for combination in grid.combinations(self.contents.grid)
            if self._among(combination, self.contents.only, "only")
        ]

    def rows(self, combination: Combination) -> list[str]:
        """Return the rows of this combination."""
        return [
            name for name, row in self.contents.rows.items() if self._among(combination, row.only, f"rows.{name}.only")
        ]

    def table(self, combination: Combination) -> Table:
        """Return the table of one combination, with every row checked."""
        rows = self.rows(combination)
        if not rows:
            raise ConfigError(
                f"{source(self.path, combination)}:\n  rows: every row's `only` leaves this table out; add a row, "
                "or leave the table out of the file's own `only`"
            )
        configs = {row: self.run(combination, row) for row in rows}
        settings = self.settings(combination)
        for row, config in configs.items():
            if reason := _untested(config, settings.columns):
                raise ConfigError(f"{source(self.path, combination, row)}:\n  {reason}")
        titles = {row: self.contents.rows[row].title or row for row in rows}
        return Table(self._name(combination), self.path, combination, settings, titles, configs)

    def run(self, combination: Combination, row: str, overrides: Iterable[str] = ()) -> RunConfig:
        """Return a row's run: [base], then the values of the axes, then the row."""
        values: Values = {"name": self._name(combination), **self.contents.base}
        for axis, value in combination.items():
            values = merged(values, self.contents.grid[axis][value].model_extra or {})
        where = source(self.path, combination, row)
        config = resolve_run(merged(values, self._row_values(row)), where, overrides)
        try:
            find_method(config.method)
        except ConfigError as error:
            raise ConfigError(f"{where}:\n  {error}") from None
        if not config.sites:
            raise ConfigError(f"{where}:\n  sites: the row names no sites; write [[base.sites]], or sites in the row")
        return config

    def _row_values(self, row: str, below: tuple[str, ...] = ()) -> Values:
        """Return what a row changes, merged over the row that it extends."""
        changes, extended = self.contents.rows[row].model_extra or {}, self.contents.rows[row].extends
        if extended is None:
            return changes
        where = f"rows.{row}.extends"
        self._check_names(where, [extended], self.contents.rows)
        if extended in (row, *below):
            chain = " -> ".join([*below, row, extended])
            raise ConfigError(
                f"{self.path}:\n  {where}: the rows extend each other in a circle ({chain}); take one out"
            )
        return merged(self._row_values(extended, (*below, row)), changes)

    def settings(self, combination: Combination) -> TableConfig:
        """Return the settings of one combination's table."""
        shown: Values = {key: getattr(self.contents, key) for key in Settings.model_fields}
        rows, titles = self.rows(combination), {}
        for axis, value in combination.items():
            changes = self.contents.grid[axis][value].model_dump(include=set(Settings.model_fields), exclude_none=True)
            titles[axis] = changes.pop("title", value)
            shown.update(changes)
        for key in ("baselines", "bounds"):
            self._check_names(key, shown[key], self.contents.rows)
            shown[key] = [row for row in shown[key] if row in rows]
        for name, claim in shown["claims"].items():
            self._check_names(f"claims.{name}", [claim.first, *filter(None, [claim.second])], self.contents.rows)
            scores = [column for column in shown["columns"] if Column(column).is_score]
            self._check_names(f"claims.{name}.column", filter(None, [claim.column]), scores, "score of this table")
        for key in ("title", "caption"):
            shown[key] = grid.filled(shown[key], titles, f"{self.path}:\n  {key}")
        shown["paper"] = self._paper(combination, shown["columns"], rows)
        if isinstance(caption := shown["paper"].get("caption"), str):
            shown["paper"]["caption"] = grid.filled(caption, titles, f"{self.path}:\n  paper.caption")
        return check(TableConfig, shown, source(self.path, combination))

    def _paper(self, combination: Combination, columns: list[str], rows: list[str]) -> Values:
        """Return the paper's numbers for this combination: those of all tables, then those of matching keys with =."""
        numbers: Values = {}
        for key, value in self.contents.paper.items():
            if "=" not in key:
                numbers[key] = value
                continue
            fixed = grid.parse(key, self.contents.grid, f'{self.path}:\n  paper."{key}"')
            if not isinstance(value, dict):
                raise ConfigError(f'{self.path}:\n  paper."{key}": write a table of rows, such as {{ fedid = 91.8 }}')
            if grid.fits(combination, fixed):
                numbers.update(value)
        printed = numbers.pop("columns", columns)
        self._check_names("paper.columns", printed, columns, "column of this table")
        self._check_names("paper", [row for row in numbers if row != "caption"], self.contents.rows)
        resolved = {}
        for row, value in numbers.items():
            if isinstance(value, list):
                if len(value) != len(printed):
                    raise ConfigError(
                        f"{source(self.path, combination)}:\n  paper.{row}: {len(value)} numbers for {len(printed)} "
                        f"columns; write one for each of {', '.join(printed)}, or name others in paper.columns"
                    )
                value = dict(zip(printed, value, strict=True))
            if isinstance(value, dict):
                self._check_names(f"paper.{row}", value, columns, "column of this table")
            if row in rows or row == "caption":
                resolved[row] = value
        return resolved

    def _among(self, combination: Combination, only: list[str], key: str) -> bool:
        patterns = [grid.parse(text, self.contents.grid, f"{self.path}:\n  {key}") for text in only]
        return not patterns or any(grid.fits(combination, pattern) for pattern in patterns)

    def _name(self, combination: Combination) -> str:
        return (self.contents.name or _name_of(self.path)) + grid.folder_suffix(combination)

    def _check_names(self, key: str, names: Iterable[str], known: Iterable[str], what: str = "row") -> None:
        choices = list(known)
        for name in names:
            if name not in choices:
                near = difflib.get_close_matches(str(name), choices, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(choices)}"
                raise ConfigError(f"{self.path}:\n  {key}: {name!r} is no {what}; {hint}")


def find_tables(path: Path) -> list[Path]:
    """Return the file itself, or the tables directly in a folder: files with a title (others are only extended)."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ConfigError(f"{path}: there is no such file; give a table's TOML file, or a folder of such files")
    files = [file for file in sorted(path.glob("*.toml")) if "title" in read_values(file)[0]]
    if not files:
        raise ConfigError(f"{path}: no TOML file in it has a title; give a table's file, or a folder of such files")
    return files


def read_file(path: Path) -> TableFile:
    """Read a table's file and check its own keys; errors name the file, the key and the remedy."""
    contents = check(Contents, read_merged_values(path)[0], str(path))
    if not contents.rows:
        raise ConfigError(f"{path}:\n  rows: the table has no rows; write [rows.NAME] for each, over what is in [base]")
    for row in contents.rows:
        if not re.fullmatch(NAME, row):
            raise ConfigError(
                f"{path}:\n  rows: {row!r} has other signs than letters, digits and . _ -; rename the row"
            )
    grid.check_axes(contents.grid, str(path))
    return TableFile(path, contents)


def read_tables(path: Path, only: Iterable[str] = ()) -> list[Table]:
    """Return the tables of a file, one for each combination that `only` selects."""
    file = read_file(path)
    chosen = grid.chosen(file.combinations, list(only), file.contents.grid, str(path))
    return [file.table(combination) for combination in chosen]


def family_name(path: Path) -> str:
    """Return the name that the run folders of a file's tables begin with."""
    return read_file(path).contents.name or _name_of(path)


def load_row(path: Path, row: str | None, only: Iterable[str] = (), overrides: Iterable[str] = ()) -> RunConfig:
    """Return the run of one row with the table's first seed, and `key=value` overrides."""
    if "rows" not in read_merged_values(path)[0]:
        raise ConfigError(f"{path}: is no table: it has no [rows]; leave --row and --only out to run it")
    file = read_file(path)
    axes = file.contents.grid
    left = grid.chosen(file.combinations, list(only), axes, str(path))
    if len(left) > 1:
        open_axes = [axis for axis in axes if len({one[axis] for one in left}) > 1]
        choices = "; ".join(f"{axis}: {', '.join(dict.fromkeys(one[axis] for one in left))}" for axis in open_axes)
        raise ConfigError(
            f"{path}:\n  --only: {len(left)} tables of the file are left; choose one with "
            f"{' '.join(f'--only {axis}=VALUE' for axis in open_axes)} ({choices})"
        )
    combination = left[0]
    if row is None or row not in file.rows(combination):
        fault = "the file is a table; name a row of it" if row is None else f"there is no row {row!r}"
        known = ", ".join(file.rows(combination))
        raise ConfigError(f"{source(path, combination)}:\n  --row: {fault}; rows: {known}")
    seed = file.settings(combination).seeds[0]
    return file.run(combination, row, [f"seed={seed}", *overrides])


def _untested(config: RunConfig, columns: list[str]) -> str:
    """Return why a row's run will lack a mean of last rounds; empty if it has all."""
    for column in map(Column, columns):
        if column.rounds > config.rounds:
            return f"rounds: {config.rounds} are fewer than column {column.key} is a mean of"
        if column.rounds > 1 and config.report.evaluate == "end":
            return f'report.evaluate: column {column.key} needs a test after every round; set "rounds"'
    return ""


def _name_of(path: Path) -> str:
    """Return the path below `experiments`, such as fedid-small-ablation; elsewhere the file's own name."""
    parts = path.resolve().with_suffix("").parts
    below = parts[::-1].index("experiments") if "experiments" in parts[:-1] else 1
    return re.sub(r"[^A-Za-z0-9_.-]", "-", "-".join(parts[-below:]))
