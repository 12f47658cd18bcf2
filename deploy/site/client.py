"""The command `flower-client`: read the site's file, check everything, start Flower's stock SuperNode."""

from __future__ import annotations

import getpass
import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from fedstill.client.app import state_root
from fedstill.client.release.approval import Approvals, NotApproved
from fedstill.client.release.ledger import Ledger, LedgerError
from fedstill.common.config import ConfigError, SiteFile
from fedstill.common.config.files import load_site
from fedstill.common.prometheus import MetricsServer
from fedstill.deploy import flower_commands as flower
from fedstill.deploy.processes import free_port, run_to_end
from fedstill.deploy.site.checks import Check, check_site
from fedstill.deploy.site.clientapp import write_commands
from fedstill.deploy.site.ledger import check_ledger
from fedstill.deploy.site.observed import SiteNumbers
from fedstill.deploy.site.presence import only_client, sign_off

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")
ledger = typer.Typer(help="What left this site, line by line.", no_args_is_help=True)
app.add_typer(ledger, name="ledger")
console = Console(soft_wrap=True, highlight=False)
SITE = "The site's own configuration file, site.toml."
Site = Annotated[Path, typer.Option("--site", help=SITE)]


@app.callback(invoke_without_command=True)
def start(
    context: typer.Context,
    site: Annotated[Path | None, typer.Option(help=SITE)] = None,
    check: Annotated[bool, typer.Option("--check", help="Only print the list of checks; do not start.")] = False,
    skip_checks: Annotated[
        bool, typer.Option("--skip-checks", help="Start at once: for a supervisor that restarts the SuperNode.")
    ] = False,
) -> None:
    """Check this site, then start its SuperNode; the site's file wins over a run's on data, device and limits."""
    if context.invoked_subcommand is not None:
        return
    if site is None:
        raise ConfigError("which site is this? flower-client --site site.toml")
    settings = load_site(site)
    if check or not skip_checks:
        failed = [result for result in _show(settings) if not result.ok]
        if failed:
            console.print(f"{len(failed)} of the checks failed: {', '.join(result.name for result in failed)}.")
            raise typer.Exit(1)
    if check:
        console.print("All is well. To start: flower-client --site " + str(site))
        return
    command = supernode_command(site, settings)
    sys.stdout.flush()
    with only_client(state_root(settings)):
        sign_off(settings, state_root(settings))
        if settings.metrics is not None:
            MetricsServer(settings.metrics, SiteNumbers(settings))
        env = flower.environment()
        env["PATH"] = f"{write_commands(state_root(settings) / 'commands')}{os.pathsep}{env['PATH']}"
        raise typer.Exit(run_to_end(command, env))


@app.command()
def approve(
    site: Site,
    run: Annotated[str | None, typer.Argument(help="The run's name; without it, those that wait are listed.")] = None,
    seen: Annotated[str, typer.Argument(help="How the listed hash begins: a run announced anew is refused.")] = "",
) -> None:
    """Say yes to a run as it was announced: its configuration and the code that is installed here are pinned."""
    settings = load_site(site)
    book = Approvals(state_root(settings))
    if run is None:
        for told in book.waiting():
            what = f"{told['run']} {told['hash'][:16]}: {told['method']}, {told['rounds']} rounds; announced"
            console.print(f"{what} {told['announced']}", json.dumps(told, indent=1), sep="\n", markup=False)
        return
    told = book.approve(run, getpass.getuser(), seen)
    Ledger(state_root(settings) / "ledger.jsonl", run).approved(told)
    console.print(json.dumps(told, indent=1), markup=False)
    console.print(f"{run} is approved, with this configuration and this code and no other.")


@ledger.command("verify")
def verify_ledger(
    site: Site,
    record: Annotated[Path | None, typer.Option(help="events.jsonl of a run, as the coordinator has it.")] = None,
    certificate: Annotated[Path | None, typer.Option(help="server.crt, to check the record's signatures.")] = None,
) -> None:
    """Check that no line of this site's ledger was changed or taken out, and that the end is there that a run saw."""
    settings = load_site(site)
    console.print(check_ledger(state_root(settings) / "ledger.jsonl", settings.name, record, certificate))


def supernode_command(path: Path, site: SiteFile) -> list[str]:
    """Return the command line of the stock SuperNode."""
    if site.superlink is None:
        raise ConfigError(f'{path}: superlink is missing; write: superlink = "coordinator.example.org:9092"')
    if site.insecure:
        trust = ["--insecure"]
    elif site.root_certificates is None or site.private_key is None:
        raise ConfigError(
            f"{path}: root_certificates and private_key are needed; or insecure = true for a trial on one machine"
        )
    else:
        trust = ["--root-certificates", str(site.root_certificates)]
        trust += ["--auth-supernode-private-key", str(site.private_key)]
    command = [
        sys.executable,
        "-m",
        "fedstill.deploy.site.supernode",
        *trust,
        "--superlink",
        site.superlink,
        "--host",
        "127.0.0.1",
    ]
    command += ["--port", str(site.port or free_port())]
    command += ["--health-server-address", site.health] if site.health else []
    return [*command, "--node-config", f'site="{path.expanduser().resolve()}"']


def _show(site: SiteFile) -> list[Check]:
    results = []
    for line in check_site(site, state_root(site)):
        mark = "[green]ok    [/green]" if line.ok else "[red]failed[/red]"
        console.print(f"{mark}  {line.name:<12} {escape(line.said)}")
        if not line.ok:
            console.print(f"        {'':<12} [bold]to cure it:[/bold] {escape(line.cure)}")
        results.append(line)
    return results


def main() -> None:
    """Print errors that a person can act on as one message and exit with code 1."""
    try:
        app()
    except (ValueError, OSError, LedgerError, NotApproved) as error:
        if os.environ.get("FEDSTILL_DEBUG"):
            raise
        print(f"flower-client: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
