"""A whole federation on this machine: Flower's SuperLink, with one SuperNode per site or Flower's simulation."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fedstill.common.config import RunConfig
from fedstill.deploy import flower_commands as flower
from fedstill.deploy.coordinator.certificates import Certificates, make_certificates
from fedstill.deploy.launch import RunFailed, Watch
from fedstill.deploy.launch.simulation import simulation_settings
from fedstill.deploy.launch.warm import write_commands
from fedstill.deploy.processes import Processes, alive, free_port

CONNECTION = "local"
POLL = "0.1"  # seconds between two looks of Flower's SuperExec for an app to start; 1 by default


def run_here(config: RunConfig, folder: Path, on: str, resume: bool, watch: Watch, secure: bool = False) -> None:
    """Start the processes, run, and end them all; return only if the run really finished."""
    home = folder / "flower"
    env = flower.environment(home)
    env.update(FEDSTILL_STATE=str(folder / "sites"), OMP_NUM_THREADS=env.get("OMP_NUM_THREADS", "1"))
    env.setdefault("FLWR_SUPEREXEC_TASK_POLL_INTERVAL", POLL)
    certificates = make_certificates(folder / "certificates") if secure else None
    if certificates is not None:
        env.update(FEDSTILL_CERTIFICATE=str(certificates.certificate), FEDSTILL_KEY=str(certificates.key))
    bundle = flower.write_bundle(folder / "app", config, str(folder), resume)
    with tempfile.TemporaryDirectory(prefix="fedstill-") as short, Processes(folder / "logs", env) as processes:
        watch({"event": "starting", "what": "starting Flower's SuperLink and SuperNodes"})
        if on == "local":  # a socket's path is short; a run's folder may be deep
            line = Path(short) / "apps"
            commands = write_commands(Path(short) / "commands", line)
            processes.environment["PATH"] = f"{commands}{os.pathsep}{env['PATH']}"
            processes.start("apps", [sys.executable, "-m", "fedstill.deploy.launch.warm", str(line)])
        _start_superlink(processes, home, config, on, certificates)
        simulation = simulation_settings(config) if on == "simulation" else {}
        watch({"event": "starting", "what": "handing the run to Flower"})
        run_id = flower.start_run(bundle, CONNECTION, env, simulation)
        watch({"event": "starting", "what": "starting the server"})
        _follow(folder, processes, lambda: flower.run_status(run_id, CONNECTION, env), watch)


def _start_superlink(
    processes: Processes, home: Path, config: RunConfig, on: str, certificates: Certificates | None
) -> None:
    port, fleet = free_port(), free_port()
    command = ["flower-superlink", "--disable-runtime-dependency-installation", "--host", "127.0.0.1"]
    command += ["--port", str(port)]
    connection: dict[str, Any] = {"address": f"127.0.0.1:{port}"}
    if certificates is None:
        command.append("--insecure")
        connection["insecure"] = True
    else:
        command += ["--ssl-ca-certfile", str(certificates.authority), "--ssl-certfile", str(certificates.certificate)]
        command += ["--ssl-keyfile", str(certificates.key)]
        connection["root-certificates"] = str(certificates.authority)
    if on == "simulation":
        command.append("--simulation")
    else:
        command += ["--fleet-api-address", f"127.0.0.1:{fleet}"]
    flower.write_connection(home, CONNECTION, connection)
    processes.start("superlink", command)
    processes.wait_for_port("superlink", port, 60)
    if on != "simulation":
        processes.wait_for_port("superlink", fleet, 60)
        for number, site in enumerate(config.sites):
            _start_supernode(processes, f"127.0.0.1:{fleet}", number, site.name, certificates)


def _start_supernode(
    processes: Processes, superlink: str, number: int, name: str, certificates: Certificates | None
) -> None:
    node = f"partition-id={number}"
    trust = ["--insecure"]
    if certificates is not None:
        node += f' root-certificates="{certificates.authority}"'
        trust = ["--root-certificates", str(certificates.authority)]
    command = ["flower-supernode", *trust, "--superlink", superlink, "--host", "127.0.0.1", "--port", str(free_port())]
    processes.start(f"site-{name}", [*command, "--node-config", node])


def _follow(folder: Path, processes: Processes, status: Callable[[], str], watch: Watch) -> None:
    """Pass every new event to `watch` until the run ends; Flower's status decides whether it succeeded."""
    events = tail_events(folder / "events.jsonl")
    began = time.time()
    asked, server, end = time.monotonic(), 0, None
    while end is None:
        for event in events:
            if event is None:
                break
            if _seconds(event) < began - 1:
                continue  # from an earlier start of this run
            watch(event)
            server = int(event.get("pid", server))
            if event["event"] in ("run_finished", "run_stopped", "run_failed"):
                end = event
        if end is not None:
            break
        for name in processes.running:
            processes.check(name)
        gone = server and not alive(server)
        if gone or (not server and time.monotonic() - asked > 15):
            asked = time.monotonic()
            if (state := status()).startswith("finished") or gone:
                raise RunFailed(f"the ServerApp is gone (Flower says {state}):\n{processes.tail('superlink')}")
        time.sleep(0.2)
    if end["event"] == "run_failed":
        raise RunFailed(str(end["reason"]))
    patience = time.monotonic() + 30
    while alive(server) and time.monotonic() < patience:
        time.sleep(0.1)
    while not (state := status()).startswith("finished") and time.monotonic() < patience:
        time.sleep(1)
    if end["event"] == "run_stopped":
        from fedstill.server.record import RunStopped

        raise RunStopped(int(end["round"]), folder.name)
    if state != "finished:completed":
        raise RunFailed(f"the method finished, but Flower says {state}; see {folder / 'logs'}")


def tail_events(path: Path) -> Iterator[dict[str, Any] | None]:
    """Yield every event of a run as it is written; None whenever there is no new one yet."""
    while not path.exists():
        yield None
    with path.open(encoding="utf-8") as file:
        pending = ""
        while True:
            pending += file.readline()
            if pending.endswith("\n"):
                yield json.loads(pending)
                pending = ""
            else:
                yield None


def _seconds(event: dict[str, Any]) -> float:
    from datetime import datetime

    return datetime.fromisoformat(event["time"]).timestamp()
