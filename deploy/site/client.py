"""The command `flower-client`: read the site's file, check everything, start Flower's stock SuperNode."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from fedstill.client.app import state_root
from fedstill.common.config import ConfigError, SiteFile
from fedstill.common.config.files import load_site
from fedstill.deploy import flower_commands as flower
from fedstill.deploy.processes import free_port, run_to_end
from fedstill.deploy.site.checks import Check, check_site
from fedstill.deploy.site.presence import only_client, sign_off

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")
console = Console(soft_wrap=True, highlight=False)


@app.command()
def start(
    site: Annotated[Path, typer.Option(help="The site's own configuration file, site.toml.")],
    check: Annotated[bool, typer.Option("--check", help="Only print the list of checks; do not start.")] = False,
    skip_checks: Annotated[
        bool, typer.Option("--skip-checks", help="Start at once: for a supervisor that restarts the SuperNode.")
    ] = False,
) -> None:
    """Check this site, then start its SuperNode; the site's file wins over a run's on data, device and limits."""
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
        raise typer.Exit(run_to_end(command, flower.environment()))


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
    except (ValueError, OSError) as error:
        if os.environ.get("FEDSTILL_DEBUG"):
            raise
        print(f"flower-client: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
