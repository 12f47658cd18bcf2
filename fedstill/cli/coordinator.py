"""The coordinator's commands: `fedstill superlink`, `fedstill certs` and `fedstill keys`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from fedstill.cli.tables import Json, Quiet

if TYPE_CHECKING:
    from cryptography.x509 import Certificate

console = Console(soft_wrap=True, highlight=False)
keys = typer.Typer(help="Key pairs of sites, and which of them the SuperLink lets in.", no_args_is_help=True)
certs = typer.Typer(help="A private certificate authority for the coordinator.", no_args_is_help=True)
Folder = Annotated[Path, typer.Option("--folder", help="Where ca.crt, ca.key, server.crt and server.key lie.")]
State = Annotated[Path, typer.Option("--state", help="The folder of the database and of the runs.")]
On = Annotated[str, typer.Option("--on", help="The SuperLink connection's name in Flower's config.")]
NAME = "coordinator"


def add_to(app: typer.Typer) -> None:
    """Add these commands to the app."""
    app.command()(superlink)
    app.add_typer(keys, name="keys")
    app.add_typer(certs, name="certs")
    app.command()(backup)
    app.command()(restore)


def _tell(text: str, as_json: bool, **facts: Any) -> None:
    """Print what was done: for a person, or with --json for a program."""
    if as_json:
        print(json.dumps({name: str(fact) if isinstance(fact, Path) else fact for name, fact in facts.items()}))
    else:
        console.print(text)


def _validity(server: Certificate) -> dict[str, Any]:
    from fedstill.deploy.coordinator.certificates import hosts_of

    return {"hosts": list(hosts_of(server)), "until": f"{server.not_valid_after_utc:%Y-%m-%dT%H:%M:%SZ}"}


def backup(
    target: Annotated[Path, typer.Argument(help="The file to write; it holds private keys, mode 600.")],
    state: State = Path("coordinator"),
    certificates: Folder = Path("certificates"),
    as_json: Json = False,
) -> None:
    """Copy database, runs, certificates and the register of keys into one file; the coordinator may go on meanwhile."""
    from fedstill.deploy.coordinator.backup import back_up

    count = back_up(target, _places(state, certificates))
    said = f"{target}: {count} files with their checksums. It holds private keys: keep it where they are safe."
    _tell(said, as_json, backup=target, files=count)


def restore(
    source: Annotated[Path, typer.Argument(help="A file that `fedstill backup` wrote.")],
    state: State = Path("coordinator"),
    certificates: Folder = Path("certificates"),
    as_json: Json = False,
) -> None:
    """Put a backup back, into folders that are empty; every checksum must pass. Stop the SuperLink first."""
    from fedstill.deploy.coordinator.backup import restore as put_back

    count = put_back(source, _places(state, certificates))
    said = f"{count} files are back. Start it: fedstill superlink --certificates {certificates} --state {state}"
    _tell(said, as_json, files=count, state=state, certificates=certificates)


def _places(state: Path, certificates: Path) -> dict[str, Path]:
    from fedstill.deploy import flower_commands as flower
    from fedstill.deploy.coordinator.keys import SITES

    home = Path(flower.environment().get("FLWR_HOME") or Path.home() / ".flwr")
    return {"state": state.expanduser(), "certificates": certificates.expanduser(), "sites": home / SITES}


def superlink(
    certificates: Annotated[
        Path | None, typer.Option(help="The folder of ca.crt, server.crt and server.key; see: fedstill certs")
    ] = None,
    host: Annotated[str, typer.Option(help="Where the coordinator's own commands come in; nobody else should.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(help="Its port.")] = 8000,
    sites: Annotated[str, typer.Option(help="Where the sites' SuperNodes come in.")] = "0.0.0.0:9092",
    stream: Annotated[str, typer.Option(help="Where the sites' streams come in during a run.")] = "0.0.0.0:9093",
    advertise: Annotated[
        str | None, typer.Option(help="How sites call the stream; by default the certificate's first host.")
    ] = None,
    state: Annotated[Path, typer.Option(help="The folder of the database and of the runs.")] = Path("coordinator"),
    name: Annotated[str, typer.Option(help="The connection's name in Flower's config, for --on.")] = NAME,
    health: Annotated[str | None, typer.Option(help="An address at which the SuperLink says that it lives.")] = None,
    metrics: Annotated[str | None, typer.Option(help="A loopback address for Prometheus while a run goes on.")] = None,
    site_certificates: Annotated[
        bool, typer.Option("--site-certificates", help="Open streams only to sites with one: fedstill certs site")
    ] = False,
    insecure: Annotated[bool, typer.Option("--insecure", help="No TLS, no keys: for a trial on one machine.")] = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Start Flower's SuperLink with TLS, node authentication and a database; in the foreground, until Ctrl-C."""
    from fedstill.deploy.coordinator.superlink import Listening, prepare
    from fedstill.deploy.processes import run_to_end

    where = Listening(host, port, sites, stream, advertise, health, metrics, site_certificates)
    command, env, connection = prepare(where, certificates, state, name, insecure)
    said = f"SuperLink for sites on {sites}, streams on {stream}; runs in {env['FEDSTILL_RUNS']}\n"
    said += f"Start a run here with: fedstill run CONFIG.toml --on {name}    ({connection['address']})"
    if as_json or not quiet:  # one line of JSON; Flower's own log follows on the error output
        facts = {"sites": sites, "stream": stream, "runs": env["FEDSTILL_RUNS"], "on": name}
        _tell(said, as_json, **facts, address=connection["address"])
    sys.stdout.flush()
    raise typer.Exit(run_to_end(command, env))


@certs.command("new")
def new_authority(
    host: Annotated[list[str], typer.Option(help="A name or address of the coordinator; again for each of them.")],
    folder: Folder = Path("certificates"),
    days: Annotated[int, typer.Option(help="How long the server's certificate is valid.")] = 365,
    as_json: Json = False,
) -> None:
    """Make an authority, and a server certificate for the SuperLink and the stream."""
    from fedstill.deploy.coordinator.certificates import make_authority, make_server

    authority = make_authority(folder)
    files = make_server(folder, host, days)
    said = f"Give {authority} to every site. {folder / 'ca.key'} and {files.key} stay here."
    _tell(said, as_json, authority=authority, certificate=files.certificate, key=files.key, hosts=host)


@certs.command("server")
def new_server(
    host: Annotated[list[str], typer.Option(help="A name or address of the coordinator; again for each of them.")],
    folder: Folder = Path("certificates"),
    days: Annotated[int, typer.Option(help="How long it is valid.")] = 365,
    as_json: Json = False,
) -> None:
    """Renew the server's certificate; sites keep their ca.crt. Restart the SuperLink afterwards."""
    from fedstill.deploy.coordinator.certificates import make_server

    made = make_server(folder, host, days)
    said = f"{made.certificate} is new; restart the SuperLink."
    _tell(said, as_json, certificate=made.certificate, key=made.key, hosts=host)


@certs.command("site")
def new_site(
    name: Annotated[str, typer.Argument(help="The site's name, as in its site.toml.")],
    public: Annotated[Path, typer.Argument(help="The site's .pub file: its private key stays there.")],
    folder: Folder = Path("certificates"),
    days: Annotated[int, typer.Option(help="How long it is valid.")] = 365,
    as_json: Json = False,
) -> None:
    """Certify a site's key for the stream; the site names the file as certificate in its site.toml."""
    from fedstill.deploy.coordinator.certificates import make_site

    made = make_site(folder, name, public, days)
    said = f"Send {made} to {name}: it is no secret. Start the SuperLink with --site-certificates."
    _tell(said, as_json, site=name, certificate=made)


@certs.command("renew")
def renew_server(
    folder: Folder = Path("certificates"),
    days: Annotated[int, typer.Option(help="How long it is valid.")] = 365,
    as_json: Json = False,
) -> None:
    """Renew the server's key and certificate for the hosts it has; both change at once. Restart the SuperLink."""
    from fedstill.deploy.coordinator.certificates import read_certificate, renew

    facts = _validity(read_certificate(renew(folder, days).certificate))
    said = f"good for {', '.join(facts['hosts'])} until {facts['until'][:10]}; restart the SuperLink."
    _tell(said, as_json, **facts)


@certs.command("check")
def check_certificates(folder: Folder = Path("certificates"), as_json: Json = False) -> None:
    """Say whether the certificates and the key may be used, and until when."""
    from fedstill.deploy.coordinator.certificates import Certificates, check_server

    facts = _validity(check_server(Certificates.of(folder)))
    _tell(f"good for {', '.join(facts['hosts'])} until {facts['until'][:10]}", as_json, **facts)


@keys.command("new")
def new_key(
    path: Annotated[Path, typer.Argument(help="The private key's file; the public half is PATH.pub.")],
    as_json: Json = False,
) -> None:
    """Make a site's key pair, at the site: only the .pub file travels."""
    from fedstill.deploy.coordinator import keys as rooms

    public = rooms.new_key(path)
    shown = rooms.fingerprint(public.read_text())
    said = f"{path} stays here, mode 600. Send {public} to the coordinator, and read out to each other:\n{shown}"
    _tell(said, as_json, private=path, public=public, fingerprint=shown)


@keys.command("register")
def register_key(
    public: Annotated[Path, typer.Argument(help="The site's .pub file.")],
    name: Annotated[str, typer.Argument(help="The site's name.")],
    on: On = NAME,
    as_json: Json = False,
) -> None:
    """Let a site in from now on."""
    from fedstill.deploy import flower_commands as flower
    from fedstill.deploy.coordinator import keys as rooms

    env = flower.environment()
    number = rooms.register(public, name, on, env)
    shown = rooms.fingerprint_of(number, on, env)
    _tell(f"{name} is registered as node {number}: {shown}", as_json, site=name, node=str(number), fingerprint=shown)


@keys.command("rotate")
def rotate_key(
    public: Annotated[Path, typer.Argument(help="The .pub file of the site's new key.")],
    name: Annotated[str, typer.Argument(help="The site's name.")],
    on: On = NAME,
    as_json: Json = False,
) -> None:
    """Let a site's new key in and shut its old one out; the site then names the new one as private_key."""
    from fedstill.deploy import flower_commands as flower
    from fedstill.deploy.coordinator import keys as rooms

    env = flower.environment()
    number = rooms.rotate(public, name, on, env)
    shown = rooms.fingerprint_of(number, on, env)
    _tell(f"{name} is node {number} now: {shown}", as_json, site=name, node=str(number), fingerprint=shown)


@keys.command("list")
def list_keys(
    on: On = NAME,
    as_json: Json = False,
) -> None:
    """List the registered sites."""
    from fedstill.deploy import flower_commands as flower
    from fedstill.deploy.coordinator import keys as rooms

    rows = rooms.registered(on, flower.environment())
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    table = Table()
    for column in rows[0] if rows else ["name", "status"]:
        table.add_column(column, overflow="fold")  # a fingerprint is useful only in full
    for row in rows:
        table.add_row(*(str(value or "") for value in row.values()))
    console.print(table)


@keys.command("revoke")
def revoke_key(
    name: Annotated[str, typer.Argument(help="The site's name, or its node number.")],
    on: On = NAME,
    as_json: Json = False,
) -> None:
    """Shut a site out: its key opens nothing any more."""
    from fedstill.deploy import flower_commands as flower
    from fedstill.deploy.coordinator import keys as rooms

    number = rooms.revoke(name, on, flower.environment())
    said = f"{name} (node {number}) is out. A run that it takes part in loses it at its next step."
    _tell(said, as_json, site=name, node=str(number))
