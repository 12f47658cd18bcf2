"""The command `fedstill`."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from fedstill import __version__, comparing, coordinator
from fedstill.screen import Screen, main_score, results, size

app = typer.Typer(
    name="fedstill",
    help="Federated distillation of language models between organisations, on Flower.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
coordinator.add_to(app)
comparing.add_to(app)
console = Console()
LEAST = 10_000_000  # bytes of free space without which no run goes on
Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of a table.")]
Runs = Annotated[Path, typer.Option("--runs", envvar="FEDSTILL_RUNS", help="The folder that holds the runs.")]


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="Print the version and leave.")] = False) -> None:
    if version:
        print(f"fedstill {__version__}")
        raise typer.Exit


@app.command()
def run(
    config: Annotated[str, typer.Argument(help="The run's configuration, a TOML file.", metavar="CONFIG.toml")],
    on: Annotated[
        str,
        typer.Option(
            help="Where: [bold]local[/bold] (real SuperLink and SuperNodes on this machine), [bold]simulation[/bold] "
            "(Flower's, on this machine), or the name of a SuperLink connection in Flower's config."
        ),
    ] = "local",
    change: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Change a value, such as method.name=ds-fl or sites.north.model=minilm."
        ),
    ] = None,
    runs: Runs = Path("runs"),
    tls: Annotated[
        bool, typer.Option("--tls", help="With local: SuperLink and stream with TLS, from a new private CA.")
    ] = False,
) -> None:
    """Run a federation and show its results."""
    from fedstill.common.config.files import load_run

    settings = load_run(Path(config), change or [])
    folder = _new_folder(runs, settings.name)
    _launch(settings, folder, on, resume=False, tls=tls)


@app.command()
def resume(
    run: Annotated[str, typer.Argument(help="A run's name, or the path of its folder; `latest` is the newest.")],
    runs: Runs = Path("runs"),
) -> None:
    """Take up a run where it stopped: at most one round is repeated."""
    from fedstill.common.config.files import load_run

    folder = _find(runs, run)
    summary = _summary(folder)
    if summary.get("status") == "finished":
        console.print(f"{folder.name} is finished already.", highlight=False)
        results(console, summary, str(folder))
        return
    launch = json.loads((folder / "launch.json").read_text()) if (folder / "launch.json").is_file() else {}
    _launch(
        load_run(folder / "config.toml"), folder, launch.get("on", "local"), resume=True, tls=launch.get("tls", False)
    )


@app.command("runs")
def list_runs(as_json: Json = False, runs: Runs = Path("runs")) -> None:
    """List the runs in the runs folder."""
    rows = [_row(folder) for folder in _folders(runs)]
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    if not rows:
        console.print(f"There are no runs in {runs.resolve()}; start one with: fedstill run experiments/demo.toml")
        return
    _table(["run", "status", "method", "rounds", "score", "central", "seconds"], rows)


@app.command()
def show(
    run: Annotated[
        str, typer.Argument(help="A run's name, or the path of its folder; `latest` is the newest.")
    ] = "latest",
    as_json: Json = False,
    runs: Runs = Path("runs"),
) -> None:
    """Show one run's results."""
    folder = _find(runs, run)
    summary = _summary(folder)
    if as_json:
        print(json.dumps(summary, indent=1))
    else:
        results(console, summary, str(folder))


@app.command()
def models(as_json: Json = False) -> None:
    """List the built-in models; any AutoModel name or folder works as well."""
    from fedstill.common.models.builtin import builtin_models

    rows = [
        {
            "name": model.name,
            "family": model.family,
            "parameters": model.parameters,
            "pretrained": model.pretrained,
            "description": model.description,
        }
        for model in builtin_models()
    ]
    print(json.dumps(rows, indent=1)) if as_json else _table(list(rows[0]), rows)


@app.command()
def methods(as_json: Json = False) -> None:
    """List the methods with their papers, presets and parameters."""
    from fedstill.strategies import METHODS

    rows: list[dict[str, Any]] = [
        {
            "name": method.name,
            "paper": method.paper,
            "presets": list(method.presets),
            "models": "the same everywhere" if method.needs_same_models else "any mix",
            "parameters": method.parameters().model_dump(mode="json", by_alias=True),
        }
        for method in METHODS.values()
    ]
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    _table(["name", "paper", "presets", "models"], [{**row, "presets": ", ".join(row["presets"])} for row in rows])
    console.print("Parameters with their defaults: fedstill methods --json; what each does: docs/METHODS.md")


@app.command()
def tasks(
    as_json: Json = False,
    folder: Annotated[
        Path | None, typer.Option(help="Look for the files there instead of in $FEDSTILL_DATA.", show_default=False)
    ] = None,
) -> None:
    """List the known tasks and whether their texts are at hand; other files and hub data sets need no entry here."""
    from fedstill.common.data.tasks import KNOWN, SITE_SETS, TASKS, source_of

    rows: list[dict[str, Any]] = [
        {
            "name": task.name,
            "labels": list(task.labels),
            "metric": task.metric,
            "columns": list(task.text_columns),
            "source": source_of(task.name, folder),
            "hub": known.hub.name if (known := KNOWN.get(task.name)) and known.hub else None,
            "title": task.title,
        }
        for task in TASKS.values()
    ]
    for found in SITE_SETS.values():  # of a site alone: task.name = "mixed"
        hub = found.hub.name if found.hub else None
        row: dict[str, Any] = {
            "name": found.name,
            "labels": [],
            "metric": found.kind,
            "columns": [],
            "hub": hub,
            "title": found.title,
        }
        rows.append({**row, "source": found.source(folder)})
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    shown = [
        {**row, "labels": ", ".join(row["labels"]), "texts": "here" if row["source"] else row["hub"] and "on the hub"}
        for row in rows
    ]
    _table(["name", "labels", "metric", "texts", "title"], shown)
    console.print(
        "Which files, and where from: fedstill tasks --json, docs/TASKS.md. Set FEDSTILL_DATA or task.folder."
    )


@app.command()
def partition(
    config: Annotated[str, typer.Argument(help="The run's configuration, a TOML file.", metavar="CONFIG.toml")],
    change: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a value, such as data.alpha=0.1.")
    ] = None,
    by: Annotated[str, typer.Option(help="Count by [bold]label[/bold] or by [bold]domain[/bold].")] = "label",
    picture: Annotated[Path | None, typer.Option(help="Draw it into this file (png, svg or pdf).")] = None,
    as_json: Json = False,
) -> None:
    """Show which texts each site of a run would get; nothing is started."""
    from fedstill.common.config.files import load_run
    from fedstill.partition import dealt, draw

    found = dealt(load_run(Path(config), change or []), by)
    if picture is not None:
        draw(found, picture)
    if as_json:
        print(json.dumps(found.rows(), indent=1))
        return
    _table(["site", *found.kinds, "texts"], found.rows())
    console.print(found.title, highlight=False)
    if picture is not None:
        console.print(f"Drawn in {picture}", highlight=False)


# --- starting ---


def _launch(settings: Any, folder: Path, on: str, *, resume: bool, tls: bool) -> None:
    from fedstill.common.checkpoint import write_atomically
    from fedstill.deploy.launch.local import check_run

    check_run(settings, on)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "launch.json", json.dumps({"on": on, "tls": tls}))
    if not resume:
        write_atomically(folder / "config.toml", settings.to_toml())
    if on in ("local", "simulation"):
        _point_latest(folder)
        _run_here(settings, folder, on, resume=resume, tls=tls)
    else:
        _run_there(settings, folder, on, resume=resume)


def _run_here(settings: Any, folder: Path, on: str, *, resume: bool, tls: bool) -> None:
    from fedstill.deploy.launch.local import run_here

    for number in (signal.SIGINT, signal.SIGTERM):  # a shell's background job starts with SIGINT ignored
        signal.signal(number, _interrupt)
    (folder / "summary.json").unlink(missing_ok=True)
    try:
        with Screen(console) as screen:
            run_here(settings, folder.resolve(), on, resume, screen.show, tls)
    except KeyboardInterrupt:
        console.print(f"Stopped. To go on: fedstill resume {folder.name}", highlight=False)
        raise typer.Exit(130) from None
    except Exception as error:
        if (folder / "checkpoints").is_dir():
            error.add_note(f"To go on from the last checkpoint: fedstill resume {folder.name}")
        raise
    results(console, _summary(folder), str(folder))


def _run_there(settings: Any, folder: Path, on: str, *, resume: bool) -> None:
    """On a SuperLink that runs elsewhere; its record lies with the coordinator, under the run's name."""
    from fedstill.common.checkpoint import write_atomically
    from fedstill.deploy import flower_commands as flower
    from fedstill.deploy.launch.local import RunFailed

    bundle = flower.write_bundle(folder / "app", settings, folder.name, resume)
    (folder / "summary.json").unlink(missing_ok=True)
    env = flower.environment()
    try:
        number = flower.start_run(bundle, on, env, {})
    except flower.FlowerError:
        if not resume:
            shutil.rmtree(folder)
        raise
    _point_latest(folder)
    console.print(f"Run {number} started on {on} as {folder.name}; its folder is the coordinator's.", highlight=False)
    console.print(f"Its log: flwr log {number} {on} --stream    To stop it: flwr stop {number} {on}", highlight=False)
    status, shown, full = "", "", False
    while not status.startswith("finished"):
        status = flower.run_status(number, on, env)
        if not full and shutil.disk_usage(folder).free < LEAST:  # then neither run nor SuperLink can write that down
            full = True
            console.print(f"The disk of {folder} is full: free some space, then: fedstill resume {folder.name}")
        if status != shown:
            console.print(f"{datetime.now():%H:%M:%S}  {status}", highlight=False)
            shown = status
        if not status.startswith("finished"):
            time.sleep(5)
    known = _summary(folder)  # of the run itself, where this is the coordinator's machine and its folder of runs
    if status != "finished:completed":
        reason = f"{known['reason']}\n" if known["status"] == "failed" else ""
        raise RunFailed(f"run {number} on {on} ended as {status}; {reason}see: flwr log {number} {on} --show")
    if known["status"] == "finished":
        results(console, known, str(folder))
        return
    reason = f"its results lie with the coordinator of {on}, in the folder {folder.name} of its runs"
    write_atomically(folder / "summary.json", json.dumps({"status": "finished elsewhere", "reason": reason}))


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _new_folder(runs: Path, name: str) -> Path:
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    folder = runs / f"{name}-{stamp}"
    extra = 1
    while folder.exists():
        extra += 1
        folder = runs / f"{name}-{stamp}-{extra}"
    return folder


def _point_latest(folder: Path) -> None:
    link, draft = folder.parent / "latest", folder.parent / f".latest-{os.getpid()}"
    draft.unlink(missing_ok=True)
    draft.symlink_to(folder.name)
    draft.replace(link)


# --- reading runs ---


def _folders(runs: Path) -> list[Path]:
    if not runs.is_dir():
        return []
    found = [entry for entry in runs.iterdir() if not entry.is_symlink() and (entry / "config.toml").is_file()]
    return sorted(found, key=lambda entry: entry.stat().st_mtime)


def _find(runs: Path, name: str) -> Path:
    for folder in (runs / name, Path(name)):
        if (folder / "config.toml").is_file():
            return folder.resolve()
    known = ", ".join(folder.name for folder in _folders(runs)[-5:]) or "none"
    raise ValueError(f"there is no run {name!r} in {runs.resolve()}; the newest runs there: {known}")


def _summary(folder: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((folder / "summary.json").read_text()))
    except (OSError, ValueError):
        return {"status": "unfinished", "reason": f"to go on: fedstill resume {folder.name}"}


def _row(folder: Path) -> dict[str, Any]:
    summary = _summary(folder)
    central, seconds = summary.get("central") or {}, summary.get("seconds") or {}
    return {
        "run": folder.name,
        "status": summary["status"],
        "method": summary.get("method"),
        "rounds": summary.get("rounds"),
        "score": main_score(central) if central else None,
        "central": central.get(main_score(central)),
        "seconds": seconds.get("total"),
    }


def _table(columns: list[str], rows: list[dict[str, Any]]) -> None:
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


def main() -> None:
    """Errors that a person can act on are one message and exit code 1; anything else shows where it broke."""
    try:
        app()
    except Exception as error:
        from fedstill.deploy.flower_commands import FlowerError
        from fedstill.deploy.processes import ProcessError

        if os.environ.get("FEDSTILL_DEBUG") or not _for_people(error, (FlowerError, ProcessError)):
            raise
        notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", []))
        print(f"fedstill: {error}{notes}", file=sys.stderr)
        sys.exit(1)


def _for_people(error: Exception, more: tuple[type[Exception], ...]) -> bool:
    from fedstill.deploy.launch.local import RunFailed

    return isinstance(error, (ValueError, OSError, RunFailed, *more))
