"""Commands that show what there is: models, methods, tasks, and which site would get which texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from fedstill.cli.tables import Json, Only, Row, console, print_table, read_run
from fedstill.common.readable import size

models = typer.Typer(help="List the built-in models, or fetch one from the hub.")


def add_to(app: typer.Typer) -> None:
    """Add these commands to the app."""
    app.add_typer(models, name="models")
    for command in (methods, tasks, partition):
        app.command()(command)


@models.callback(invoke_without_command=True)
def list_models(context: typer.Context, as_json: Json = False) -> None:
    """List the built-in models, or fetch one from the hub; any AutoModel name or folder works as well."""
    if context.invoked_subcommand is not None:
        return
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
    print(json.dumps(rows, indent=1)) if as_json else print_table(list(rows[0]), rows)


@models.command()
def pull(
    name: Annotated[
        str, typer.Argument(help="The model's name on the hub, such as google/electra-small-discriminator.")
    ],
    to: Annotated[
        Path | None, typer.Option(help="The folder; by default models/NAME. It can be copied to any machine.")
    ] = None,
    revision: Annotated[str, typer.Option(help="A branch, tag or commit.")] = "main",
    as_json: Json = False,
) -> None:
    """Fetch a model from the hub into a folder, for sites without internet: model = "FOLDER" in their TOML."""
    from fedstill.common.models.hub import pull_model

    pulled = pull_model(name, to or Path("models") / name.rpartition("/")[2], revision)
    if as_json:
        print(json.dumps(pulled.facts(), indent=1))
        return
    console.print(f"{name} ({pulled.commit[:12]}) is in {pulled.folder}, {size(pulled.bytes)}.", highlight=False)
    console.print(f'Use it with: model = "{pulled.folder}"', highlight=False, soft_wrap=True)


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
    print_table(["name", "paper", "presets", "models"], [{**row, "presets": ", ".join(row["presets"])} for row in rows])
    console.print("Parameters with their defaults: fedstill methods --json; what each does: docs/methods/index.md")


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
    for site_set in SITE_SETS.values():  # for a site alone: task.name = "mixed"
        hub = site_set.hub.name if site_set.hub else None
        row: dict[str, Any] = {
            "name": site_set.name,
            "labels": [],
            "metric": site_set.kind,
            "columns": [],
            "hub": hub,
            "title": site_set.title,
        }
        rows.append({**row, "source": site_set.source(folder)})
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    shown = [
        {**row, "labels": ", ".join(row["labels"]), "texts": "here" if row["source"] else row["hub"] and "on the hub"}
        for row in rows
    ]
    print_table(["name", "labels", "metric", "texts", "title"], shown)
    console.print(
        "Which files, and where from: fedstill tasks --json, docs/TASKS.md. Set FEDSTILL_DATA or task.folder."
    )


def partition(
    config: Annotated[
        str,
        typer.Argument(help="The run's configuration, a TOML file; or a table's, with --row.", metavar="CONFIG.toml"),
    ],
    row: Row = None,
    only: Only = None,
    change: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a value, such as data.alpha=0.1.")
    ] = None,
    by: Annotated[str, typer.Option(help="Count by [bold]label[/bold] or by [bold]domain[/bold].")] = "label",
    picture: Annotated[Path | None, typer.Option(help="Draw it into this file (png, svg or pdf).")] = None,
    as_json: Json = False,
) -> None:
    """Show which texts each site of a run would get; nothing is started."""
    from fedstill.cli.shares import dealt, draw

    shares = dealt(read_run(config, row, only, change), by)
    if picture is not None:
        draw(shares, picture)
    if as_json:
        print(json.dumps(shares.rows(), indent=1))
        return
    print_table(["site", *shares.kinds, "texts"], shares.rows())
    console.print(shares.title, highlight=False)
    if picture is not None:
        console.print(f"Drawn in {picture}", highlight=False)
