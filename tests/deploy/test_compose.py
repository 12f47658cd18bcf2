"""deploy/docker/demo.sh with podman: the real Dockerfile and compose file, TLS and keys, FedID, a site killed and back.

The base image is a stand-in: no image registry can be reached here, so mmdebstrap puts Debian's packages into a folder,
which is imported under the name that the Dockerfile asks for. Everything above it is built by the Dockerfile itself.
Images stay in build/compose, so that the next run builds only what changed. They take some 10 GB and more with every
change of the code (29 GB after four builds): `make clean` removes them.
"""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "deploy/docker"
STORE = ROOT / "build/compose"
SITES = ("north", "east", "south")
TOOLS = ("podman", "runc", "netavark", "aardvark-dns", "catatonit", "mmdebstrap", "iptables")
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")


@cache
def why_not() -> str | None:
    """Why no containers can be run here; None if they can."""
    if os.geteuid() != 0:
        return "these containers need root"
    search = f"{os.environ['PATH']}:/usr/sbin:/usr/lib/podman:/usr/libexec/podman"
    missing = [tool for tool in TOOLS if shutil.which(tool, path=search) is None]
    if missing:
        return f"missing: {', '.join(missing)}; apt-get install --no-install-recommends {' '.join(TOOLS)}"
    if not (Path(sys.executable).parent / "podman-compose").exists():
        return "podman-compose is missing: make test-compose installs it"
    return None


pytestmark = [
    pytest.mark.compose,
    pytest.mark.timeout(2400),
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]


def pip_settings() -> dict[str, str]:
    """This machine's own pip settings, without those of the command itself."""
    done = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    pairs = (line.partition("=") for line in done.stdout.splitlines())
    known = {name.rpartition(".")[2]: value.strip("'\"").replace("\\n", " ") for name, _, value in pairs}
    return {name: value for name, value in known.items() if name in ("index-url", "extra-index-url", "find-links")}


class Podman:
    """podman with settings and images of its own, which nothing else on the machine sees."""

    def __init__(self) -> None:
        STORE.mkdir(parents=True, exist_ok=True)
        most = {
            name: resource.getrlimit(getattr(resource, f"RLIMIT_{name.upper()}"))[1] for name in ("nofile", "nproc")
        }
        limits = ", ".join(f'"{name}={min(value, 16384)}:{min(value, 16384)}"' for name, value in most.items())
        (STORE / "containers.conf").write_text(
            f'[containers]\ndefault_ulimits = [{limits}]\n[engine]\nruntime = "runc"\ncgroup_manager = "cgroupfs"\n'
            'events_logger = "file"\n[network]\nnetwork_backend = "netavark"\n'
        )
        (STORE / "storage.conf").write_text(
            f'[storage]\ndriver = "overlay"\nrunroot = "{STORE}/run"\ngraphroot = "{STORE}/images"\n'
        )
        pip = {**pip_settings(), "cert": str(CERTIFICATES)}
        (STORE / "pip.conf").write_text("[global]\n" + "".join(f"{name} = {value}\n" for name, value in pip.items()))
        folders = re.findall(r"(?:file://)?(/[^\s:]+?)(?:/simple)?(?=\s|$)", " ".join(pip.values()))
        shared = [(path, path) for path in dict.fromkeys([*folders, str(CERTIFICATES)]) if Path(path).exists()]
        build = [f"--volume={here}:{there}:ro" for here, there in [*shared, (str(STORE / "pip.conf"), "/etc/pip.conf")]]
        build += ["--build-arg=TORCH_INDEX="]  # this machine's settings say where torch comes from
        self.env = {
            **os.environ,
            "CONTAINERS_CONF": str(STORE / "containers.conf"),
            "CONTAINERS_STORAGE_CONF": str(STORE / "storage.conf"),
            "BUILDAH_ISOLATION": "chroot",
            "DISABLE_HC_SYSTEMD": "true",  # no systemd here: demo.sh asks for health itself
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "COMPOSE": " ".join(["podman-compose", *(f"--podman-build-args={option}" for option in build)]),
        }

    def __call__(self, *words: str, code: int = 0) -> str:
        done = subprocess.run(["podman", *words], env=self.env, capture_output=True, text=True, timeout=600)
        assert done.returncode == code, f"podman {' '.join(words)}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def base(self) -> None:
        """A stand-in for the image that the Dockerfile begins with."""
        [name] = set(re.findall(r"^FROM (python:\S+)", (DOCKER / "Dockerfile").read_text(), re.MULTILINE))
        name = f"docker.io/library/{name}"
        if subprocess.run(["podman", "image", "exists", name], env=self.env).returncode == 0:
            return
        without = [f"--dpkgopt=path-exclude=/usr/share/{part}/*" for part in ("doc", "man", "locale")]
        hook = '--customize-hook=ln -s python3 "$1/usr/bin/python"'
        command = ["mmdebstrap", "--variant=minbase", "--mode=root", "--include=python3,python3-venv,ca-certificates"]
        sources = [str(path) for path in sorted(Path("/etc/apt/sources.list.d").glob("debian*.sources"))]
        tar = STORE / "base.tar"
        subprocess.run([*command, *without, hook, "bookworm", str(tar), *sources], check=True, env=self.env)
        self("import", str(tar), name)
        tar.unlink()


@pytest.fixture(scope="module")
def podman() -> Iterator[Podman]:
    """Containers, networks and volumes are removed by a process that outlives the test, however that ends."""
    made = Podman()
    made.base()
    subprocess.run([DOCKER / "demo.sh", "down"], env=made.env, capture_output=True)  # of a run before a power cut
    script = ["sh", "-c", 'cat > /dev/null; "$1" down', "sh", str(DOCKER / "demo.sh")]
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "start_new_session": True}
    remover = subprocess.Popen(script, stdin=subprocess.PIPE, env=made.env, **quiet)
    yield made
    assert remover.stdin is not None
    remover.stdin.close()
    remover.wait(300)
    assert made("ps", "--all", "--quiet") == ""
    assert made("volume", "ls", "--quiet") == ""


class Demo:
    """demo.sh under way, and what its coordinator has written."""

    def __init__(self, podman: Podman, log: Path, *options: str) -> None:
        self.podman, self.log, self.began = podman, log, time.monotonic()
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [DOCKER / "demo.sh", *options], env=podman.env, stdout=output, stderr=subprocess.STDOUT
            )

    def events(self, name: str, **having: Any) -> list[dict[str, Any]]:
        volume = self.podman("volume", "inspect", "fedstill_coordinator", "--format", "{{.Mountpoint}}")
        files = sorted(Path(volume).glob("runs/three-sites-*/events.jsonl"))
        lines = [json.loads(line) for file in files for line in file.read_text().splitlines() if line.endswith("}")]
        found = [event for event in lines if event["event"] == name]
        return [event for event in found if all(event.get(key) == value for key, value in having.items())]

    def wait_for(self, name: str, seconds: float = 240, **having: Any) -> dict[str, Any]:
        end = time.monotonic() + seconds
        while not (found := self.events(name, **having)):
            assert self.process.poll() is None, self.log.read_text()[-4000:]
            assert time.monotonic() < end, f"no {name} {having}:\n{self.log.read_text()[-4000:]}"
            time.sleep(0.5)
        return found[-1]

    def wait_for_line(self, words: str, seconds: float) -> float:
        """Seconds since the start when demo.sh says it."""
        end = time.monotonic() + seconds
        while words not in self.log.read_text(errors="replace"):
            assert self.process.poll() is None, self.log.read_text()[-4000:]
            assert time.monotonic() < end, self.log.read_text()[-4000:]
            time.sleep(0.2)
        return time.monotonic() - self.began


def test_the_demo_runs_in_containers_and_survives_the_loss_of_a_site(podman: Podman, tmp_path: Path) -> None:
    (DOCKER / "report.html").unlink(missing_ok=True)
    changes = ["rounds=40", "exchange.reconnect=5", "report.alone=false", "report.centralized=false"]
    demo = Demo(podman, tmp_path / "demo.log", *(word for change in changes for word in ("--set", change)))
    try:
        built = demo.wait_for_line("== coordinator", 1500)
        served = demo.wait_for_line("== sites", 240)
        joined = demo.wait_for_line("== run", 400)
        demo.wait_for("round_finished", round=1)

        # as the compose file says: nobody special, nothing to write on, no way to another site or to port 8000
        assert podman("exec", "fedstill_north_1", "id", "-u") == "10001"
        podman("exec", "fedstill_north_1", "touch", "/opt/mark", code=1)
        reach = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 3)"
        podman("exec", "fedstill_north_1", "python", "-c", reach, "coordinator", "9092")
        for host, port in (("coordinator", "8000"), ("east", "9110")):
            podman("exec", "fedstill_north_1", "python", "-c", reach, host, port, code=1)
        known = json.loads(podman("exec", "fedstill_coordinator_1", "fedstill", "keys", "list", "--json"))
        assert {(row["name"], row["status"]) for row in known} == {(site, "online") for site in SITES}

        first = podman("inspect", "fedstill_east_1", "--format", "{{.State.Pid}}")
        os.kill(int(first), signal.SIGKILL)  # the container's init, and with it everything in the container
        demo.wait_for("left_out", site="east")
        back = demo.wait_for("readmitted", site="east")
        assert podman("inspect", "fedstill_east_1", "--format", "{{.State.Pid}}") != first
        demo.podman("exec", "fedstill_coordinator_1", "fedstill", "stop", "latest", "--runs", "/fedstill/runs")
        assert demo.process.wait(240) == 0, demo.log.read_text()[-4000:]
    finally:
        demo.process.kill()
        demo.process.wait()
    last = max(event["round"] for event in demo.events("round_finished"))
    assert last >= back["round"] > 1
    size = int(podman("image", "inspect", "fedstill-site:0.2.0", "--format", "{{.Size}}"))
    print(
        f"\nimages {built:.0f} s, coordinator healthy {served - built:.0f} s later, sites registered and healthy "
        f"{joined - served:.0f} s after that; image {size / 1e9:.2f} GB"
    )


def test_the_demo_again_takes_what_is_there_and_runs_to_the_end(podman: Podman, tmp_path: Path) -> None:
    demo = Demo(podman, tmp_path / "again.log", "--set", "report.alone=false", "--set", "report.centralized=false")
    assert demo.process.wait(600) == 0, demo.log.read_text()[-4000:]
    done = demo.events("run_finished")
    assert done
    assert (DOCKER / "report.html").stat().st_size > 30_000
    print(f"\nagain, images and keys there: {time.monotonic() - demo.began:.0f} s")
