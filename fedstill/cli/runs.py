"""Commands on runs: start, resume, list, show."""

from __future__ import annotations

import json
import shutil
import signal
import time
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer

from fedstill.api import new_folder
from fedstill.cli.folders import all_runs, find_run, point_latest, row_of, summary_of
from fedstill.cli.tables import Json, Only, Row, Runs, console, print_table, read_run
from fedstill.screen import Screen, results

LEAST = 10_000_000  # bytes of free space that a run needs to go on


def add_to(app: typer.Typer) -> None:
    """Add these commands to the app."""
    app.command()(run)
    app.command()(resume)
    app.command("runs")(list_runs)
    app.command()(show)


def run(
    config: Annotated[
        str,
        typer.Argument(help="The run's configuration, a TOML file; or a table's, with --row.", metavar="CONFIG.toml"),
    ],
    row: Row = None,
    only: Only = None,
    on: Annotated[
        str,
        typer.Option(
            help="Where: [bold]local[/bold] (real SuperLink and SuperNodes on this machine), [bold]process[/bold] (one "
            "process, no Flower), [bold]simulation[/bold] (Flower's, on this machine), or the name of a SuperLink "
            "connection in Flower's config."
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
    settings = read_run(config, row, only, change)
    folder = new_folder(runs, settings.name)
    _launch(settings, folder, on, resume=False, tls=tls)


def resume(
    run: Annotated[str, typer.Argument(help="A run's name, or the path of its folder; `latest` is the newest.")],
    runs: Runs = Path("runs"),
) -> None:
    """Take up a run where it stopped: at most one round is repeated."""
    from fedstill.common.config.files import load_run

    folder = find_run(runs, run)
    summary = summary_of(folder)
    if summary.get("status") == "finished":
        console.print(f"{folder.name} is finished already.", highlight=False)
        results(console, summary, str(folder))
        return
    launch = json.loads((folder / "launch.json").read_text()) if (folder / "launch.json").is_file() else {}
    _launch(
        load_run(folder / "config.toml"), folder, launch.get("on", "local"), resume=True, tls=launch.get("tls", False)
    )


def list_runs(as_json: Json = False, runs: Runs = Path("runs")) -> None:
    """List the runs in the runs folder."""
    rows = [row_of(folder) for folder in all_runs(runs)]
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    if not rows:
        console.print(f"There are no runs in {runs.resolve()}; start one with: fedstill run experiments/demo.toml")
        return
    print_table(["run", "status", "method", "rounds", "score", "central", "seconds"], rows)


def show(
    run: Annotated[
        str, typer.Argument(help="A run's name, or the path of its folder; `latest` is the newest.")
    ] = "latest",
    as_json: Json = False,
    runs: Runs = Path("runs"),
) -> None:
    """Show one run's results."""
    folder = find_run(runs, run)
    summary = summary_of(folder)
    if as_json:
        print(json.dumps(summary, indent=1))
    else:
        results(console, summary, str(folder))


# --- starting ---


def _launch(settings: Any, folder: Path, on: str, *, resume: bool, tls: bool) -> None:
    from fedstill.common.checkpoint import write_atomically
    from fedstill.deploy.launch import HERE
    from fedstill.deploy.launch.checks import check_run

    check_run(settings, on)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "launch.json", json.dumps({"on": on, "tls": tls}))
    if not resume:
        write_atomically(folder / "config.toml", settings.to_toml())
    if on in HERE:
        point_latest(folder)
        _run_here(settings, folder, on, resume=resume, tls=tls)
    else:
        _run_there(settings, folder, on, resume=resume)


def _run_here(settings: Any, folder: Path, on: str, *, resume: bool, tls: bool) -> None:
    from fedstill.deploy.launch import start

    for number in (signal.SIGINT, signal.SIGTERM):  # a shell's background job starts with SIGINT ignored
        signal.signal(number, _interrupt)
    (folder / "summary.json").unlink(missing_ok=True)
    try:
        with Screen(console) as screen:
            start(settings, folder.resolve(), on, resume=resume, watch=screen.show, secure=tls)
    except KeyboardInterrupt:
        console.print(f"Stopped. To go on: fedstill resume {folder.name}", highlight=False)
        raise typer.Exit(130) from None
    except Exception as error:
        if (folder / "checkpoints").is_dir():
            error.add_note(f"To go on from the last checkpoint: fedstill resume {folder.name}")
        raise
    results(console, summary_of(folder), str(folder))


def _run_there(settings: Any, folder: Path, on: str, *, resume: bool) -> None:
    """Run on a SuperLink elsewhere; the coordinator keeps the record, under the run's name."""
    from fedstill.common.checkpoint import write_atomically
    from fedstill.deploy import flower_commands as flower
    from fedstill.deploy.launch import RunFailed

    bundle = flower.write_bundle(folder / "app", settings, folder.name, resume)
    (folder / "summary.json").unlink(missing_ok=True)
    env = flower.environment()
    try:
        number = flower.start_run(bundle, on, env, {})
    except flower.FlowerError:
        if not resume:
            shutil.rmtree(folder)
        raise
    point_latest(folder)
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
    known = summary_of(folder)  # of the run itself, where this is the coordinator's machine and its folder of runs
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
