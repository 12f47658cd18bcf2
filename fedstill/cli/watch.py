"""The commands `fedstill watch` and `fedstill stop`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedstill.cli.folders import find_run, summary_of
from fedstill.cli.tables import Json, Runs, console

if TYPE_CHECKING:
    from fedstill.deploy.watch.app import Serving

Name = Annotated[str, typer.Argument(help="A run's name, or the path of its folder; `latest` is the newest.")]


def add_to(app: typer.Typer) -> None:
    """Add these commands to the app."""
    app.command()(watch)
    app.command()(stop)


def watch(
    run: Name = "latest",
    host: Annotated[str, typer.Option(help="Where to listen; another address than loopback needs --certificates.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int | None, typer.Option(help="By default 8700, or a free one if that is taken.")] = None,
    certificates: Annotated[
        Path | None, typer.Option(help="The folder of server.crt and server.key; see: fedstill certs")
    ] = None,
    token: Annotated[
        str | None,
        typer.Option(envvar="FEDSTILL_TOKEN", help="Who has it may look and steer; by default a new one is made."),
    ] = None,
    look_only: Annotated[bool, typer.Option("--look-only", help="The page can neither stop nor resume the run.")] = (
        False
    ),
    as_json: Json = False,
    runs: Runs = Path("runs"),
) -> None:
    """Show a run as a live page in your browser: one in flight, one that is over, or one on another machine's disk."""
    from fedstill.deploy.watch.app import Serving, open_door
    from fedstill.deploy.watch.follow import Folder

    folder = find_run(runs, run)
    serving = Serving(Folder(folder, steer=not look_only), open_door(host, port, certificates, token))
    if as_json:  # one line, then the page is served until Ctrl-C
        print(json.dumps({"run": folder.name, "url": serving.door.url}), flush=True)
    else:
        console.print(f"{folder.name}: {serving.door.url}    (Ctrl-C ends the page, not the run)", soft_wrap=True)
    serving.run()


def beside(folder: Path) -> Serving:
    """Serve the page of a run that this process runs."""
    from fedstill.deploy.watch.app import Serving, open_door
    from fedstill.deploy.watch.follow import Folder

    serving = Serving(Folder(folder), open_door()).start()
    console.print(f"Watch it: {serving.door.url}", highlight=False, soft_wrap=True)
    return serving


def stop(run: Name = "latest", as_json: Json = False, runs: Runs = Path("runs")) -> None:
    """Ask a run to stop after its current round; `fedstill resume` continues it."""
    from fedstill.server.record import STOP

    folder = find_run(runs, run)
    status = summary_of(folder)["status"]
    if status != "unfinished":
        raise ValueError(f"{folder.name} is not running: {status}")
    (folder / STOP).touch()
    if as_json:
        print(json.dumps({"run": folder.name, "stopping": True}))
        return
    said = f"{folder.name} stops when its round is saved. To go on: fedstill resume {folder.name}"
    console.print(said, highlight=False, soft_wrap=True)
