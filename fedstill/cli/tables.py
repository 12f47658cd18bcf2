"""What the commands share: options, the console, a run's configuration, and tables on the screen."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from fedstill.common.readable import size

if TYPE_CHECKING:
    from fedstill.common.config import RunConfig

console = Console()
Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of a table.")]
Runs = Annotated[Path, typer.Option("--runs", envvar="FEDSTILL_RUNS", help="The folder that holds the runs.")]
Row = Annotated[
    str | None, typer.Option("--row", help="Of a table's file: the row to run, with the table's first seed.")
]
Only = Annotated[
    list[str] | None,
    typer.Option("--only", metavar="AXIS=VALUE", help="Of a family of tables: which, such as task=sst2; repeatable."),
]


def read_run(config: str, row: str | None, only: list[str] | None, changes: list[str] | None) -> RunConfig:
    """Read a run from its own file, or from a row of a table."""
    if row is None and not only:
        from fedstill.common.config.files import load_run

        return load_run(Path(config), changes or [])
    from fedstill.experiments.compare.table_file import load_row

    return load_row(Path(config), row, only or [], changes or [])


def print_table(columns: list[str], rows: list[dict[str, Any]]) -> None:
    table = Table()
    for column in columns:
        table.add_column(column)
    for row in rows:
        table.add_row(*("" if row[column] is None else _cell(column, row[column]) for column in columns))
    console.print(table)


def _cell(column: str, value: Any) -> str:
    if column == "parameters" and isinstance(value, int):
        return size(value).removesuffix("B").strip()
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.3f}" if isinstance(value, float) else str(value)
