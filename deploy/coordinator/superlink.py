"""How the coordinator starts Flower's SuperLink: with TLS, node authentication and a database."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedstill.common.config import ConfigError
from fedstill.deploy import flower_commands as flower
from fedstill.deploy.coordinator.certificates import Certificates, check_server, hosts_of

EVERYWHERE = ("0.0.0.0", "[::]", "::")


@dataclass(frozen=True)
class Listening:
    """The coordinator's addresses: for its own commands, for SuperNodes, for streams."""

    host: str = "127.0.0.1"
    port: int = 8000
    sites: str = "0.0.0.0:9092"
    stream: str = "0.0.0.0:9093"
    advertise: str | None = None
    health: str | None = None
    metrics: str | None = None
    site_certificates: bool = False  # whether a stream is opened only to sites with a certificate


Prepared = tuple[list[str], dict[str, str], dict[str, Any]]


def prepare(where: Listening, folder: Path | None, state: Path, name: str, insecure: bool = False) -> Prepared:
    """Check the certificates and add the connection to Flower's config; return command, environment and connection."""
    if (folder is None) != insecure:
        raise ConfigError(
            "--certificates names the folder that `fedstill certs new` made; --insecure is for a trial on one machine. "
            "Give one of the two"
        )
    if insecure and where.site_certificates:
        raise ConfigError("--site-certificates needs TLS, and --insecure has none: take one of them out")
    state = state.expanduser().resolve()
    state.mkdir(parents=True, exist_ok=True, mode=0o700)
    env = flower.environment()
    env.update(FEDSTILL_RUNS=str(state / "runs"), FEDSTILL_LISTEN=where.stream)
    env.update({"FEDSTILL_METRICS": where.metrics} if where.metrics else {})
    command = ["flower-superlink", "--disable-runtime-dependency-installation", "--host", where.host]
    command += ["--port", str(where.port), "--fleet-api-address", where.sites]
    command += ["--database", str(state / "superlink.db")]
    command += ["--health-server-address", where.health] if where.health else []
    hosts = ["127.0.0.1"]
    connection: dict[str, Any] = {"insecure": True}
    if folder is None:
        command.append("--insecure")
    else:
        files = Certificates.of(folder.expanduser().resolve())
        hosts = hosts_of(check_server(files))
        command += ["--ssl-ca-certfile", str(files.authority), "--ssl-certfile", str(files.certificate)]
        command += ["--ssl-keyfile", str(files.key), "--enable-supernode-auth"]
        env.update(FEDSTILL_CERTIFICATE=str(files.certificate), FEDSTILL_KEY=str(files.key))
        connection = {"root-certificates": str(files.authority)}
        if where.site_certificates:
            env["FEDSTILL_AUTHORITY"] = str(files.authority)
    env["FEDSTILL_ADVERTISE"] = where.advertise or _called(hosts[0], where.stream)
    host = hosts[0] if where.host in EVERYWHERE else where.host
    if folder is not None and host not in hosts:
        raise ConfigError(
            f"--host {host} is not among the certificate's hosts ({', '.join(hosts)}), so that no command could trust "
            f"it: fedstill certs server --host {hosts[0]} --host {host}"
        )
    connection = {"address": f"{host}:{where.port}", **connection}
    home = Path(env.get("FLWR_HOME") or Path.home() / ".flwr")
    flower.add_connection(home, name, connection)
    return command, env, connection


def _called(host: str, listen: str) -> str:
    """Return the stream's address for sites: the certificate's host, unless the stream listens on one address only."""
    listening, _, port = listen.rpartition(":")
    return f"{host if listening in EVERYWHERE else listening}:{port}"
