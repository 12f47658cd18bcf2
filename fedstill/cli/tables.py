"""What the commands share: options, the console, and a table on the screen."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from fedstill.common.readable import size

console = Console()
Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of a table.")]
Runs = Annotated[Path, typer.Option("--runs", envvar="FEDSTILL_RUNS", help="The folder that holds the runs.")]


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
