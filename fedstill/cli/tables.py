"""What the commands share: options, the console, a run's configuration, and tables on the screen."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedstill.common.readable import duration, size

if TYPE_CHECKING:
    from fedstill.common.config import RunConfig

console = Console()
GAP, NARROW = 3, 8  # between two columns; before names are broken, other columns become so narrow
Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of text for people.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print errors only, and at the end the run's folder.")]
Runs = Annotated[Path, typer.Option("--runs", envvar="FEDSTILL_RUNS", help="The folder that holds the runs.")]
Config = Annotated[
    str,
    typer.Argument(help="The run's configuration, a TOML file; or a table's, with --row.", metavar="CONFIG.toml"),
]
Change = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Change a value, such as method.name=ds-fl or sites.north.model=minilm."
    ),
]
On = Annotated[
    str,
    typer.Option(
        help="Where: [bold]local[/bold] (real SuperLink and SuperNodes on this machine), [bold]process[/bold] (one "
        "process, no Flower), [bold]simulation[/bold] (Flower's, on this machine), or the name of a SuperLink "
        "connection in Flower's config."
    ),
]
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
    """Print rows; nothing is cut: what does not fit goes on in the next line, words before names and names last."""
    shown = {column: ["" if row[column] is None else _cell(column, row[column]) for row in rows] for column in columns}
    wide = {column: max(len(text) for text in [column, *texts]) for column, texts in shown.items()}
    words = {
        column: max(len(word) for text in [column, *texts] for word in text.split() or [""])
        for column, texts in shown.items()
    }
    room = console.width - GAP * (len(columns) - 1)
    for least in (words, dict.fromkeys(columns[1:], NARROW), dict.fromkeys(columns, 1)):
        while sum(wide.values()) > room and any(wide[column] > least.get(column, wide[column]) for column in columns):
            wide[max(least, key=lambda column: wide[column] - least[column])] -= 1
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for column in columns:
        values = [row[column] for row in rows if row[column] is not None]
        numbers = bool(values) and all(
            isinstance(value, int | float) and not isinstance(value, bool) for value in values
        )
        justify: Literal["left", "right"] = "right" if numbers else "left"
        table.add_column(column, overflow="fold", width=wide[column], justify=justify)
    for row in rows:
        table.add_row(*("" if row[column] is None else escape(_cell(column, row[column])) for column in columns))
    console.print(table)


def _cell(column: str, value: Any) -> str:
    if column == "parameters" and isinstance(value, int):
        return size(value).removesuffix("B").strip()
    if column == "seconds":
        return duration(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.3f}" if isinstance(value, float) else str(value)
