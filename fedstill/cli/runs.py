"""Commands on runs: start, resume, list, show."""

from __future__ import annotations

import json
import shutil
import signal
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from fedstill.api import new_folder
from fedstill.cli.check import before_run
from fedstill.cli.folders import all_runs, find_run, point_latest, row_of, summary_of
from fedstill.cli.tables import Change, Config, Json, On, Only, Quiet, Row, Runs, console, print_table, read_run
from fedstill.cli.watch import beside
from fedstill.screen import Screen, results

if TYPE_CHECKING:
    from fedstill.deploy.launch.forecast import Forecast
    from fedstill.deploy.watch.app import Serving

errors = Console(stderr=True)
LEAST = 10_000_000  # bytes of free space that a run needs to go on


def add_to(app: typer.Typer) -> None:
    """Add these commands to the app."""
    app.command()(run)
    app.command()(resume)
    app.command("runs")(list_runs)
    app.command()(show)
    app.command()(report)


def run(
    config: Config,
    row: Row = None,
    only: Only = None,
    on: On = "local",
    change: Change = None,
    runs: Runs = Path("runs"),
    tls: Annotated[
        bool, typer.Option("--tls", help="With local: SuperLink and stream with TLS, from a new private CA.")
    ] = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Serve the run's live page, as `fedstill watch` does.")
    ] = False,
    check: Annotated[
        bool, typer.Option("--check/--no-check", help="First check that the run can work, as `fedstill check` does.")
    ] = True,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Run a federation and show its results."""
    settings = read_run(config, row, only, change)
    talk = Talk(quiet, as_json)
    cost = None
    if check:
        with talk.waiting("checking: loading texts and models, trying a step of each"):
            said, cost = before_run(settings, on, runs)
        talk.say(said)
    folder = new_folder(runs, settings.name)
    _launch(settings, folder, on, resume=False, tls=tls, talk=talk, watch=watch, cost=cost)


def resume(
    run: Annotated[str, typer.Argument(help="A run's name, or the path of its folder; `latest` is the newest.")],
    quiet: Quiet = False,
    as_json: Json = False,
    runs: Runs = Path("runs"),
) -> None:
    """Take up a run where it stopped: at most one round is repeated."""
    from fedstill.common.config.files import load_run

    folder = find_run(runs, run)
    summary, talk = summary_of(folder), Talk(quiet, as_json)
    if summary.get("status") == "finished":
        talk.say(f"{folder.name} is finished already.")
        talk.results(folder)
        return
    launch = json.loads((folder / "launch.json").read_text()) if (folder / "launch.json").is_file() else {}
    on, tls = launch.get("on", "local"), launch.get("tls", False)
    _launch(load_run(folder / "config.toml"), folder, on, resume=True, tls=tls, talk=talk)


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


def report(
    run: Annotated[
        str, typer.Argument(help="A run's name, or the path of its folder; `latest` is the newest.")
    ] = "latest",
    out: Annotated[Path | None, typer.Option(help="Write it there instead of into the run's folder.")] = None,
    as_json: Json = False,
    runs: Runs = Path("runs"),
) -> None:
    """Write a run's report again: one HTML file that opens without a network. Every run writes one at its end."""
    from fedstill.server.page.report import write_report

    path = write_report(find_run(runs, run))
    if out is not None:
        path = Path(shutil.copyfile(path, out))
    if as_json:
        print(json.dumps({"report": str(path)}))
    else:
        console.print(f"Report: {path}", highlight=False, soft_wrap=True)


@dataclass(frozen=True)
class Talk:
    """How much a command says, and where: with --json the results alone are on the standard output."""

    quiet: bool = False
    as_json: bool = False

    @property
    def console(self) -> Console:
        """Where progress goes."""
        return errors if self.as_json else console

    def say(self, text: str) -> None:
        """Print a line."""
        if not self.quiet:
            self.console.print(text, highlight=False, soft_wrap=True)

    def waiting(self, text: str) -> AbstractContextManager[object]:
        """Show that something takes a while, on a terminal."""
        return self.console.status(text) if self.console.is_terminal and not self.quiet else nullcontext()

    def forecast(self, folder: Path) -> dict[str, Any] | None:
        """Return the cost that the check before the run worked out."""
        path = folder / "forecast.json"
        return dict(json.loads(path.read_text())) if path.is_file() else None

    def results(self, folder: Path) -> None:
        """Print a run's results."""
        if self.as_json:
            print(json.dumps(summary_of(folder), indent=1))
        elif self.quiet:
            print(folder)
        else:
            results(console, summary_of(folder), str(folder))


# --- starting ---


def _launch(
    settings: Any,
    folder: Path,
    on: str,
    *,
    resume: bool,
    tls: bool,
    talk: Talk,
    watch: bool = False,
    cost: Forecast | None = None,
) -> None:
    from fedstill.common.checkpoint import write_atomically
    from fedstill.deploy.launch import HERE
    from fedstill.deploy.launch.checks import check_run

    check_run(settings, on)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "launch.json", json.dumps({"on": on, "tls": tls}))
    if not resume:
        write_atomically(folder / "config.toml", settings.to_toml())
    if cost is not None:
        write_atomically(folder / "forecast.json", json.dumps(cost.facts()))
    page = beside(folder.resolve()) if watch else None
    if on in HERE:
        point_latest(folder)
        _run_here(settings, folder, on, resume=resume, tls=tls, talk=talk)
    else:
        _run_there(settings, folder, on, resume=resume, talk=talk)
    if page is not None:
        _keep_open(page)


def _keep_open(page: Serving) -> None:
    """Leave the page to a person who looks at it; a script goes on when the last events have been read."""
    try:
        if console.is_terminal:
            console.print(f"The page stays open at {page.door.url} until Ctrl-C.", highlight=False)
        time.sleep(7 * 86400 if console.is_terminal else 2)
    except KeyboardInterrupt:
        pass
    page.stop()


def _run_here(settings: Any, folder: Path, on: str, *, resume: bool, tls: bool, talk: Talk) -> None:
    from fedstill.deploy.launch import start
    from fedstill.server.record import RunStopped

    for number in (signal.SIGINT, signal.SIGTERM):  # a shell's background job starts with SIGINT ignored
        signal.signal(number, _interrupt)
    (folder / "summary.json").unlink(missing_ok=True)
    try:
        with Screen(talk.console, talk.forecast(folder), talk.quiet) as screen:
            start(settings, folder.resolve(), on, resume=resume, watch=screen.show, secure=tls)
    except KeyboardInterrupt:
        console.print(f"Stopped. To go on: fedstill resume {folder.name}", highlight=False)
        raise typer.Exit(130) from None
    except RunStopped as stopped:
        console.print(f"{str(stopped)[0].upper()}{str(stopped)[1:]}", highlight=False, soft_wrap=True)
        raise typer.Exit(130) from None
    except Exception as error:
        if (folder / "checkpoints").is_dir():
            error.add_note(f"To go on from the last checkpoint: fedstill resume {folder.name}")
        raise
    talk.results(folder)


def _run_there(settings: Any, folder: Path, on: str, *, resume: bool, talk: Talk) -> None:
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
    talk.console.print(
        f"Run {number} started on {on} as {folder.name}; its folder is the coordinator's.", highlight=False
    )
    talk.console.print(
        f"Its log: flwr log {number} {on} --stream    To stop it: flwr stop {number} {on}", highlight=False
    )
    status, shown, full = "", "", False
    while not status.startswith("finished"):
        status = flower.run_status(number, on, env)
        if not full and shutil.disk_usage(folder).free < LEAST:  # then neither run nor SuperLink can write that down
            full = True
            talk.console.print(f"The disk of {folder} is full: free some space, then: fedstill resume {folder.name}")
        if status != shown:
            talk.console.print(f"{datetime.now():%H:%M:%S}  {status}", highlight=False)
            shown = status
        if not status.startswith("finished"):
            time.sleep(5)
    known = summary_of(folder)  # of the run itself, where this is the coordinator's machine and its folder of runs
    if status != "finished:completed":
        reason = f"{known['reason']}\n" if known["status"] == "failed" else ""
        raise RunFailed(f"run {number} on {on} ended as {status}; {reason}see: flwr log {number} {on} --show")
    if known["status"] == "finished":
        talk.results(folder)
        return
    if known["status"] == "stopped":
        talk.console.print(known["reason"], highlight=False)
        return
    reason = f"its results lie with the coordinator of {on}, in the folder {folder.name} of its runs"
    write_atomically(folder / "summary.json", json.dumps({"status": "finished elsewhere", "reason": reason}))


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
