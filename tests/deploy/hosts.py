"""The compose file's topology without a container engine: Linux namespaces, the same scripts, volumes and settings.

Every service is a host: a network namespace of its own, joined by a cable (veth) to the coordinator's and to nobody
else's, and a mount namespace that holds its volumes. A container in it has a process namespace, a read-only copy of
this machine's files as its image, and runs the image's command as the compose file's user. No namespace has a name: all
are gone with the processes that hold them, and those die with the test, however it ends.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import yaml

from fedstill.deploy.coordinator.keys import new_key
from fedstill.deploy.processes import tied

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "deploy/docker"
COORDINATOR = "coordinator"
HOLDS = "mount --make-rprivate / && echo ready && exec sleep infinity"
TOOLS = ("ip", "unshare", "nsenter", "mount", "setpriv", "chroot")


@cache
def why_not() -> str | None:
    """Why no hosts can be made here; None if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"these commands are missing: {', '.join(missing)}"
    trial = (
        "mount --make-rprivate / && mount -t tmpfs none /mnt && mkdir /mnt/u /mnt/w /mnt/m && ip link set lo up && "
        "mount -t overlay none -o lowerdir=/,upperdir=/mnt/u,workdir=/mnt/w /mnt/m && "
        "ip link add trial0 type veth peer name trial1"
    )
    command = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", trial]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    return None if done.returncode == 0 else f"namespaces cannot be made here: {done.stderr.strip()[-300:]}"


def image_settings() -> dict[str, str]:
    """ENV of the Dockerfile's `base`."""
    text = (DOCKER / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line.removeprefix("ENV ") for line in text.splitlines() if line.startswith("ENV ")]
    return dict(pair.split("=", 1) for line in lines for pair in shlex.split(line))


def image_command(target: str) -> list[str]:
    """The script that the image of a build target starts."""
    stage = (DOCKER / "Dockerfile").read_text().split(f" AS {target}\n")[1].split("\nFROM")[0]
    [source] = re.findall(rf"^COPY (\S+) /usr/local/bin/{target}$", stage, re.MULTILINE)
    assert f'CMD ["sh", "/usr/local/bin/{target}"]' in stage
    return ["sh", str(ROOT / source)]


class Host:
    """One service of the compose file, on a machine of its own."""

    def __init__(self, name: str, service: Mapping[str, Any], folder: Path, sizes: Mapping[str, str]) -> None:
        self.name, self.service, self.folder = name, service, folder
        self.settings: dict[str, str] = {}  # more environment for its containers, such as LD_PRELOAD
        self.addresses: dict[str, str] = {}  # names in its /etc/hosts
        self.restarts = 0
        self._container: subprocess.Popen[bytes] | None = None
        self._stopped = threading.Event()
        self._lock = threading.RLock()
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        self._holder = subprocess.Popen(
            tied(["unshare", "--net", "--mount", "--", "sh", "-c", HOLDS], "KILL"),
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        )  # fmt: skip
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == b"ready\n", f"{name}: no namespaces"
        self.enter("ip", "link", "set", "lo", "up")
        for volume in self._volumes():
            (folder / volume).mkdir(exist_ok=True)
            if volume in sizes:
                self.enter("mount", "-t", "tmpfs", "-o", f"size={sizes[volume]}", "none", str(folder / volume))
            self.enter("chown", service["user"], str(folder / volume))

    # --- the machine ---

    @property
    def pid(self) -> int:
        return self._holder.pid

    def enter(self, *command: str) -> str:
        """A command on this machine, outside of the container: the machine's administrator."""
        done = subprocess.run(
            ["nsenter", "-t", str(self.pid), "-n", "-m", "--", *command],
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{self.name}: {command}: {done.stdout}{done.stderr}"
        return done.stdout

    def volume(self, name: str | None = None) -> Path:
        """A volume as this test can read it."""
        return Path(f"/proc/{self.pid}/root{self.folder / (name or self.name)}")

    def resize(self, size: str) -> None:
        """Another size for the disk of its volume."""
        self.enter("mount", "-o", f"remount,size={size}", str(self.folder / self.name))

    def cut(self, yes: bool) -> None:
        """Pull the cable out, or put it in again."""
        self.enter("ip", "link", "set", "eth0", "down" if yes else "up")

    def _volumes(self) -> dict[str, tuple[str, bool]]:
        """Named volumes: where they are mounted, and whether read-only."""
        found = [volume.split(":") for volume in self.service["volumes"] if not volume.startswith(".")]
        return {parts[0]: (parts[1], parts[2:] == ["ro"]) for parts in found}

    # --- its container ---

    def _script(self) -> str:
        """Make the container's file system, then be its init: it ends when its one command ends."""
        root, user = "/mnt", self.service["user"].split(":")
        lines = [
            "set -eu",
            "mount --make-rprivate /",
            "mount -t tmpfs none /mnt && mkdir /mnt/upper /mnt/work /mnt/root",
            "mount -t overlay none -o lowerdir=/,upperdir=/mnt/upper,workdir=/mnt/work /mnt/root",
        ]
        root += "/root"
        lines += [f"mount -t proc none {root}/proc", f"mount --rbind /dev {root}/dev"]
        lines += [f"mount -t tmpfs -o mode=1777 none {root}/tmp"]
        needed = {ROOT, Path(sys.prefix), Path(sys.base_prefix)}
        for path in sorted(needed):
            for parent in [*reversed(path.parents)][1:]:
                lines.append(f"mkdir -p {root}{parent} && chmod o+rx {root}{parent}")
            lines.append(f"mkdir -p {root}{path} && mount --rbind {path} {root}{path}")
        for volume, (where, read_only) in self._volumes().items():
            lines.append(f"mkdir -p {root}{where} && mount --bind {self.folder / volume} {root}{where}")
            lines += [f"mount -o remount,bind,ro {root}{where}"] if read_only else []
        for source, where, *_ in [volume.split(":") for volume in self.service["volumes"] if volume.startswith(".")]:
            own = self.folder / source  # a test's own, or the one beside the compose file
            lines.append(f"mkdir -p {root}{Path(where).parent}")
            lines.append(f"cp {own if own.exists() else DOCKER / source} {root}{where} && chmod a+r {root}{where}")
        hosts = "".join(f"{address} {name}\\n" for name, address in self.addresses.items())
        lines.append(f"printf '127.0.0.1 localhost\\n{hosts}' > {root}/etc/hosts")
        lines += [f"mkdir -p {root}/shims"]
        for name, module in (("fedstill", "fedstill.cli"), ("flower-client", "fedstill.deploy.site.client")):
            body = f'#!/bin/sh\\nexec {sys.executable} -c "from {module} import main; main()" "$@"\\n'
            lines.append(f"printf '{body}' > {root}/shims/{name} && chmod a+rx {root}/shims/{name}")
        lines += [f"mount -o remount,ro {root}"] if self.service.get("read_only") else []
        target = self.service["build"]["target"]
        drop = ["chroot", root, "setpriv", "--reuid", user[0], "--regid", user[1], "--clear-groups"]
        drop += ["--no-new-privs", "--bounding-set=-all", "--inh-caps=-all"]
        command = shlex.join([*drop, "sh", "-c", 'cd /fedstill && exec "$@"', "sh", *image_command(target)])
        return "\n".join([*lines, f"{command} & wait $!"])

    def _environment(self) -> dict[str, str]:
        found = {**image_settings(), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        path = f"/shims:{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin"
        return {**found, **self.settings, "PATH": path}

    def start(self) -> None:
        """Start the container; from now on it is started again whenever it ends, as the compose file says."""
        assert self.service["restart"] == "unless-stopped"
        self._stopped = threading.Event()
        threading.Thread(target=self._supervise, args=(self._stopped,), daemon=True).start()

    def _supervise(self, stopped: threading.Event) -> None:
        starts = 0
        while not stopped.is_set():
            with self._lock:
                if not stopped.is_set() and (self._container is None or self._container.poll() is not None):
                    self._container = self._begin()
                    self.restarts += starts > 0
                    starts += 1
            stopped.wait(0.2)

    def _begin(self) -> subprocess.Popen[bytes]:
        with (self.folder / f"logs/{self.name}.log").open("ab") as log:
            return subprocess.Popen(
                tied(["nsenter", "-t", str(self.pid), "-n", "-m", "--", "unshare", "--mount", "--pid", "--uts",
                      "--fork", "--kill-child", "--", "bash", "-c", self._script()], "KILL"),
                env=self._environment(), stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip

    def init(self) -> int | None:
        """The container's first process, seen from here."""
        container = self._container
        with contextlib.suppress(psutil.Error, AttributeError):
            for child in psutil.Process(container.pid).children(recursive=True):  # type: ignore[union-attr]
                if os.readlink(f"/proc/{child.pid}/ns/pid") != os.readlink("/proc/self/ns/pid"):
                    return child.pid
        return None

    def processes(self, part: str = "") -> list[psutil.Process]:
        """The container's processes whose command line has `part`, oldest first."""
        found = []
        with contextlib.suppress(OSError):
            own = os.readlink(f"/proc/{self.init()}/ns/pid")
            for process in psutil.process_iter():
                with contextlib.suppress(psutil.Error, OSError):
                    if os.readlink(f"/proc/{process.pid}/ns/pid") == own and part in " ".join(process.cmdline()):
                        found.append(process)
        return sorted(found, key=lambda process: process.pid)

    def power_off(self) -> None:
        """Every process of the container at once, without a word; the supervisor starts it again."""
        if (first := self.init()) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(first, signal.SIGKILL)

    def stop(self) -> None:
        """End the container, and do not start it again."""
        with self._lock:
            self._stopped.set()
            self.power_off()
            if self._container is not None:
                with contextlib.suppress(ProcessLookupError):
                    self._container.kill()
                self._container.wait(30)
                self._container = None

    def popen(self, *command: str, output: Path | None = None) -> subprocess.Popen[bytes]:
        """`docker compose exec`: a command in the running container, as its user."""
        first = self.init()
        assert first is not None, f"{self.name} does not run:\n{self.log()}"
        user = self.service["user"].split(":")
        inside = ["nsenter", "-t", str(first), "-n", "-m", "-p", "--", "chroot", "/mnt/root", "setpriv", "--reuid"]
        inside += [user[0], "--regid", user[1], "--clear-groups", "--no-new-privs", "sh", "-c"]
        inside += ['cd /fedstill && exec "$@"', "sh", *command]
        with (output or Path(os.devnull)).open("ab") as log:
            return subprocess.Popen(
                tied(inside, "KILL"), env=self._environment(), stdin=subprocess.DEVNULL, stdout=log,
                stderr=subprocess.STDOUT,
            )  # fmt: skip

    def run(self, *command: str, code: int = 0, seconds: float = 240) -> str:
        """The same, to its end; what it printed."""
        output = self.folder / f"logs/{self.name}-{time.monotonic_ns()}.txt"
        ended = self.popen(*command, output=output).wait(seconds)
        said = output.read_text(errors="replace")
        assert ended == code, f"{self.name}: {shlex.join(command)} ended with {ended}:\n{said}\n{self.log()}"
        return said

    def healthy(self, seconds: float = 180) -> None:
        """Wait until the compose file's health check passes."""
        end = time.monotonic() + seconds
        check = self.service["healthcheck"]["test"][1:]
        while time.monotonic() < end:
            if self.init() is not None and self.popen(*check).wait(60) == 0:
                return
            time.sleep(0.3)
        raise AssertionError(f"{self.name} is not healthy after {seconds:.0f} s:\n{self.log()}")

    def log(self, lines: int = 40) -> str:
        """The end of what its containers said."""
        path = self.folder / f"logs/{self.name}.log"
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:]) if path.exists() else ""

    def end(self) -> None:
        """The container and the machine."""
        self.stop()
        self._holder.kill()
        self._holder.wait(30)
        if self._holder.stdout is not None:
            self._holder.stdout.close()


class Hosts:
    """All services of the compose file, or some of its sites; the coordinator has a cable to each."""

    def __init__(
        self, folder: Path, sites: Sequence[str] | None = None, sizes: Mapping[str, str] | None = None
    ) -> None:
        compose = yaml.safe_load((DOCKER / "docker-compose.yml").read_text())
        services = compose["services"]
        names = [COORDINATOR, *(sites or [name for name in services if name != COORDINATOR])]
        self.hosts = {name: Host(name, services[name], folder, sizes or {}) for name in names}
        self.coordinator = self.hosts[COORDINATOR]
        self.sites = {name: host for name, host in self.hosts.items() if name != COORDINATOR}
        self.coordinator.addresses[services[COORDINATOR]["hostname"]] = "127.0.0.1"
        for number, (name, host) in enumerate(self.sites.items(), 1):
            shared = set(host.service["networks"]) & set(self.coordinator.service["networks"])
            assert shared == {name}, f"{name} has no network with the coordinator"
            self._cable(host, number)

    def _cable(self, host: Host, number: int) -> None:
        """A network of two: no route leads from it to anywhere else, as `internal: true` says."""
        center, (here, there) = self.coordinator, (f"10.77.{number}.1", f"10.77.{number}.2")
        center.enter("ip", "link", "add", host.name, "type", "veth", "peer", "name", "eth0", "netns", str(host.pid))
        for machine, device, address in ((center, host.name, here), (host, "eth0", there)):
            machine.enter("ip", "address", "add", f"{address}/24", "dev", device)
            machine.enter("ip", "link", "set", device, "up")
        host.addresses[COORDINATOR] = here

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *_: object) -> None:
        for host in reversed(self.hosts.values()):
            host.end()

    def start(self, known: bool = False) -> None:
        """`docker compose up`, then every site's key is registered, as in the tutorial; before, if `known`."""
        self.coordinator.start()
        self.coordinator.healthy()
        for host in self.sites.values():
            if known:
                new_key(host.volume() / "site.key")
                host.enter("chown", "-R", host.service["user"], str(host.folder / host.name))
            else:
                host.start()
        for host in self.sites.values():
            self.register(host)
            if known:
                host.start()

    def register(self, host: Host, name: str | None = None) -> str:
        """The public half of a site's key, carried to the coordinator by hand."""
        public = host.volume() / "site.key.pub"
        end = time.monotonic() + 60
        while not public.exists():
            assert time.monotonic() < end, f"{host.name} has made no key:\n{host.log()}"
            time.sleep(0.1)
        (self.coordinator.volume() / f"{host.name}.pub").write_text(public.read_text())
        return self.coordinator.run("fedstill", "keys", "register", f"/fedstill/{host.name}.pub", name or host.name)
