"""The command `fedstill compare`, and its progress display."""

from __future__ import annotations

import json
import signal
from collections.abc import Collection
from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from fedstill.cli.tables import Only
from fedstill.common.readable import duration

if TYPE_CHECKING:
    from fedstill.experiments.compare.results import Results
    from fedstill.experiments.compare.runner import Progress
    from fedstill.experiments.compare.tables import Table

out = Console(soft_wrap=True, highlight=False)
screen = Console(stderr=True, soft_wrap=True, highlight=False)  # so that stdout has only the results


SHOWN = 3  # runs that a line has room for


class On(StrEnum):
    """Where the runs of a table run."""

    process = "process"
    local = "local"
    simulation = "simulation"


def add_to(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command()(compare)


def compare(
    table: Annotated[
        Path, typer.Argument(help="A table's TOML file, or a folder of such files.", metavar="TABLE.toml")
    ],
    only: Only = None,
    seeds: Annotated[str | None, typer.Option(help="Other seeds than the table's own, such as 1,2,3.")] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Runs at the same time; by default as many as there are cores.")
    ] = None,
    rows: Annotated[str, typer.Option(help="Run only the rows whose names match, such as 'fedid*'.")] = "*",
    runs: Annotated[Path, typer.Option("--runs", envvar="FEDSTILL_RUNS", help="The folder that holds the runs.")] = (
        Path("runs")
    ),
    on: Annotated[
        On,
        typer.Option(
            help="[bold]process[/bold]: a run is one process; [bold]local[/bold] and [bold]simulation[/bold]: as with "
            "fedstill run, one run at a time unless --jobs says otherwise."
        ),
    ] = On.process,
    report_only: Annotated[bool, typer.Option("--report-only", help="Run nothing; write what is there.")] = False,
    reuse: Annotated[
        bool,
        typer.Option(
            "--reuse",
            help="Rows that begin alike share a site's first local training, and a run that another table has too is "
            "run once; their seconds are not shown.",
        ),
    ] = False,
    publish: Annotated[
        bool, typer.Option("--publish", help="Keep the scores of finished runs beside the table, in published/.")
    ] = False,
    published: Annotated[
        bool, typer.Option("--published", help="Count the scores kept there as finished runs; they are not run again.")
    ] = False,
    keep_models: Annotated[bool, typer.Option("--keep-models", help="Keep every run's central model.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON instead of a table.")] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Print errors only, and at the end each report.")
    ] = False,
) -> None:
    """Run every row of a table with every seed; write table, pictures and report. What is done is not run again."""
    from fedstill.experiments.compare.published import publish as keep_scores
    from fedstill.experiments.compare.published import read_published
    from fedstill.experiments.compare.report import write_report
    from fedstill.experiments.compare.results import Results
    from fedstill.experiments.compare.runner import default_jobs
    from fedstill.experiments.compare.table_file import find_tables, read_tables

    if reuse and on is not On.process:
        raise typer.BadParameter("rows share their first training only with --on process", param_hint="--reuse")
    tables = [one for file in find_tables(table) for one in read_tables(file, only or [])]
    if seeds is not None:
        tables = [one.with_seeds(_numbers(seeds)) for one in tables]
    all_results = []
    for one in tables:
        place, kept = runs / "compare" / one.name, read_published(one) if published else {}
        if not report_only:
            shared = runs / "compare" / ".first-training" if reuse else None
            screen.quiet = quiet
            _run(one, place, on, jobs or default_jobs(on.value), rows, keep_models, shared, kept)
        results = Results(one, place, kept)
        if publish:
            keep_scores(results)
        page = write_report(results)
        all_results.append(results)
        if quiet and not as_json:
            print(page)
        elif not as_json:
            _show(results, page)
    for file in dict.fromkeys(one.table.file for one in all_results):
        _claims([one for one in all_results if one.table.file == file], runs / "compare", shown=not (as_json or quiet))
    if as_json:
        facts = [results.facts() for results in all_results]
        print(json.dumps(facts[0] if len(facts) == 1 else facts, indent=1))
    if any(results.failed for results in all_results):
        raise typer.Exit(1)


def _claims(family: list[Results], place: Path, shown: bool) -> None:
    """Write what the tables of one file say of its claims, and print it."""
    from fedstill.experiments.compare.claims import write_claims
    from fedstill.experiments.compare.table_file import family_name

    folder = place / f"{family_name(family[0].table.file)}-claims"
    found = write_claims(family, folder)
    for one in found if shown else ():
        out.print(f"{one.claim.says}: {one.verdict}", markup=False)
    if found and shown:
        out.print(f"Claims: {folder / 'claims.md'}", markup=False)


def _run(
    table: Table,
    place: Path,
    on: On,
    jobs: int,
    rows: str,
    keep_models: bool,
    reuse: Path | None,
    published: Collection[str],
) -> None:
    from fedstill.experiments.compare.runner import run_table

    for number in (signal.SIGINT, signal.SIGTERM):  # a shell's background job starts with SIGINT ignored
        signal.signal(number, _interrupt)
    try:
        with Watching(table.settings.title) as watching:
            run_table(table, place, on.value, jobs, watching, rows, keep_models, reuse, published)
    except KeyboardInterrupt:
        screen.print("Stopped. The same command goes on where this one was.")
        raise typer.Exit(130) from None


def _show(results: Results, page: Path) -> None:
    from rich.table import Table as Grid

    from fedstill.experiments.compare.formatting import gaps, head, line, notes

    grid = Grid(title=results.table.settings.title, title_justify="left")
    for place, title in enumerate(head(results)):
        grid.add_column(title, justify="right" if place else "left")
    for row in results.rows:
        grid.add_row(*(f"[bold]{text[1:-1]}[/bold]" if text[:1] == "\0" else text for text in line(results, row, "\0")))
    Console(highlight=False, width=None if out.is_terminal else 240).print(grid)
    for note in notes(results):
        out.print(note, markup=False)
    for gap in gaps(results):
        out.print(gap, style="red", markup=False)
    out.print(f"Report: {page}", markup=False)


class Watching:
    """A live bar on a terminal, plain lines elsewhere."""

    def __init__(self, title: str) -> None:
        self.bar: Bar | None = None
        screen.print(f"[bold]{title}[/bold]")
        if screen.is_terminal:
            parts = (TextColumn("{task.completed}/{task.total} runs"), BarColumn(bar_width=24), TimeElapsedColumn())
            self.bar = Bar(*parts, TextColumn("{task.description}"), console=screen, transient=True)
            self.task = self.bar.add_task("", total=0)

    def __enter__(self) -> Watching:
        if self.bar is not None:
            self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def says(self, text: str) -> None:
        """Print a line that stays."""
        screen.print(text, markup=False)

    def moves(self, progress: Progress) -> None:
        """Show the table's progress, the current runs, and the time left."""
        if self.bar is not None:
            self.bar.update(self.task, total=progress.total, completed=progress.done, description=status(progress))


def status(progress: Progress) -> str:
    """Describe the current runs with their rounds, and the time left."""
    running = "; ".join(
        f"{run.name}: " + ("starting" if run.round is None else f"round {run.round} of {run.config.rounds}")
        for run in progress.running[:SHOWN]
    )
    running += f"; and {len(progress.running) - SHOWN} more" if len(progress.running) > SHOWN else ""
    left = progress.left()
    return f"{running} · {'time left unknown yet' if left is None else f'about {duration(left)} left'}"


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"--seeds {text!r}: write whole numbers with commas between them, such as 1,2,3") from None


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
