"""The command `fedstill`: one file per group of commands."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from fedstill import __version__
from fedstill.cli import catalogue, check, compare, coordinator, new, predict, runs, watch

app = typer.Typer(
    name="fedstill",
    help="Federated distillation of language models between organisations, on Flower.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
for group in (new, runs, check, watch, predict, catalogue, coordinator, compare):
    group.add_to(app)


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="Print the version and leave.")] = False) -> None:
    if version:
        print(f"fedstill {__version__}")
        raise typer.Exit


def main() -> None:
    """Print errors that a person can act on as one message and exit with code 1; others show their traceback."""
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
    from fedstill.deploy.launch import RunFailed

    return isinstance(error, (ValueError, OSError, RunFailed, *more))
