"""The command `fedstill check`, and the same before every `fedstill run`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.markup import escape

from fedstill.cli.tables import Change, Config, Json, On, Only, Row, Runs, console, print_table, read_run
from fedstill.common.readable import duration, size

if TYPE_CHECKING:
    from fedstill.common.config import RunConfig
    from fedstill.deploy.launch.examination import Examination
    from fedstill.deploy.launch.forecast import Forecast, SiteCost
    from fedstill.deploy.site.checks import Check


def add_to(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command()(check)


def check(
    config: Config,
    row: Row = None,
    only: Only = None,
    on: On = "local",
    change: Change = None,
    runs: Runs = Path("runs"),
    as_json: Json = False,
) -> None:
    """Check that a run can work, and say what it will cost; nothing is started."""
    from fedstill.deploy.launch.examination import Examination

    examination = Examination(read_run(config, row, only, change), on, runs)
    results = []
    for result in examination.checks():
        results.append(result)
        if not as_json:
            _show(result)
    cost = examination.forecast()
    if as_json:
        print(json.dumps(_facts(examination, results, cost), indent=1))
    elif cost is not None:
        _show_cost(examination, cost)
    if not examination.ok:
        failed = [result.name for result in results if not result.ok]
        if not as_json:
            console.print(f"{len(failed)} of {len(results)} checks failed: {', '.join(failed)}.", highlight=False)
        raise typer.Exit(1)


def before_run(settings: RunConfig, on: str, runs: Path) -> tuple[str, Forecast | None]:
    """Refuse a run that cannot work, with every reason; return its cost, in one line and in full."""
    from fedstill.deploy.launch.examination import examine

    cost = examine(settings, on, runs)
    return "checked" if cost is None else f"checked: {_in_short(cost)}", cost


def _show(result: Check) -> None:
    mark = "[green]ok    [/green]" if result.ok else "[red]failed[/red]"
    console.print(f"{mark}  {result.name:<13}  {escape(result.said)}", highlight=False, soft_wrap=True)
    if result.cure and not result.ok:
        console.print(f"        {'':<13}  [bold]to cure it:[/bold] {escape(result.cure)}", soft_wrap=True)


def _show_cost(examination: Examination, cost: Forecast) -> None:
    falls = examination.federation is not None and examination.federation.method.p.schedule != "constant"
    interactive = examination.federation is not None and examination.federation.method.name == "fedid"
    rows: list[dict[str, Any]] = [
        {
            "model": Path(trial.model).name,
            "of": who,
            "parameters": trial.parameters,
            "learning rate": f"{trial.rates['local']:g}",
            "distil rate": f"{trial.rates['interact' if interactive else 'distil']:g}",
            "warm-up": f"{trial.warmup:.0%}" if falls else "-",
            "falls": f"the last {trial.fall:.0%}" if falls else "-",
            "one step": f"{1000 * trial.step:.0f} ms",
        }
        for who, trial in examination.tried()
    ]
    print_table(list(rows[0]), rows)
    sites = [{"site": name, **_site_row(each)} for name, each in cost.sites.items()]
    print_table(list(sites[0]), sites)
    console.print(_in_short(cost)[0].upper() + _in_short(cost)[1:] + ".", highlight=False)
    parts = ", ".join(f"{name} {duration(seconds)}" for name, seconds in cost.parts.items())
    console.print(f"Of these: {parts}.", highlight=False)


def _site_row(cost: SiteCost) -> dict[str, Any]:
    return {
        "texts": f"{cost.texts:,}",
        "steps": f"{cost.steps:,}",
        "computes": duration(cost.seconds),
        "sends": "-" if cost.up is None else size(cost.up),
        "gets": "-" if cost.down is None else size(cost.down),
    }


def _in_short(cost: Forecast) -> str:
    text = f"about {duration(cost.seconds)} for {cost.rounds} rounds on this machine"
    text += f", {cost.exchanges:,} exchanges with each site" if cost.exchanges is not None else ""
    most = max(cost.sites.values(), key=lambda site: site.up or 0)
    if most.up is not None and most.down is not None:
        text += f", about {size(most.up)} up and {size(most.down)} down each"
    return text


def _facts(examination: Examination, results: list[Check], cost: Forecast | None) -> dict[str, Any]:
    return {
        "ok": examination.ok,
        "checks": [vars(result) for result in results],
        "models": [{"of": who, **vars(trial)} for who, trial in examination.tried()],
        "cost": None if cost is None else cost.facts(),
    }
