"""Two organisations: a SuperLink with TLS and node authentication, a site by `flower-client`, a stranger."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fedstill.common.config.files import load_run
from fedstill.deploy import flower_commands as flower
from fedstill.deploy.coordinator.keys import read_key
from fedstill.deploy.healthy import healthy
from fedstill.deploy.processes import Processes, free_port
from fedstill.deploy.site.probe import knock
from tests.conftest import SMALL

from .conftest import COMMAND

CLIENT = [sys.executable, "-m", "fedstill.deploy.site.client"]


class Coordinator:
    """Commands of both sides with one environment; each must end as expected."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.env = folder, flower.environment(folder / "flower")
        self.env.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")

    def run(self, *command: str, code: int = 0) -> str:
        done = subprocess.run(
            command, cwd=self.folder, env=self.env, capture_output=True, text=True, timeout=240, check=False
        )
        assert done.returncode == code, f"{command} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    def fedstill(self, *arguments: str, code: int = 0) -> str:
        return self.run(COMMAND, *arguments, code=code)

    def site(self, name: str, fleet: int) -> Path:
        """A site's own file, in its own folder, with a key that was made there."""
        home = self.folder / name
        self.fedstill("keys", "new", str(home / "site.key"))
        self.fedstill("certs", "site", name, str(home / "site.key.pub"))
        (home / "site.crt").write_bytes((self.folder / f"certificates/sites/{name}.crt").read_bytes())
        (home / "ca.crt").write_bytes((self.folder / "certificates/ca.crt").read_bytes())
        (home / "site.toml").write_text(
            f'name = "{name}"\nmodel = "tiny-bert"\nsuperlink = "127.0.0.1:{fleet}"\nroot_certificates = "ca.crt"\n'
            'private_key = "site.key"\ncertificate = "site.crt"\nstate = "state"\n'
            '[limits]\nleave = ["predictions"]\nmb_per_run = 50\n'
        )
        return home / "site.toml"


THIEF = """
from pathlib import Path
Path({stolen!r}).write_text(Path({secret!r}).read_text())
from flwr.clientapp import ClientApp
app = ClientApp()
"""
ASKING = """
import time
from pathlib import Path
from flwr.app import Message, RecordDict
from flwr.serverapp import ServerApp
app = ServerApp()

@app.main()
def main(grid, context):
    while not (nodes := list(grid.get_node_ids())):
        time.sleep(0.5)
    [reply] = grid.send_and_receive([Message(RecordDict(), nodes[0], "query.join")], timeout=120)
    Path({answer!r}).write_text(str(reply.error.reason))
"""


def hostile_bundle(folder: Path, stolen: Path, secret: Path, answer: Path) -> Path:
    """A run of fedstill by its looks, whose client reads a file of the site."""
    bundle = flower.write_bundle(folder, load_run(SMALL), "run", False)
    (bundle / "fedstill_run/client.py").write_text(THIEF.format(stolen=str(stolen), secret=str(secret)))
    (bundle / "fedstill_run/server.py").write_text(ASKING.format(answer=str(answer)))
    return bundle


@pytest.mark.parametrize("guarded", [True, False])
def test_a_bundle_that_reads_a_file_is_not_run_at_a_site(tmp_path: Path, guarded: bool) -> None:
    port, fleet, stream = free_port(), free_port(), free_port()
    here, secret, stolen, answer = Coordinator(tmp_path), *(tmp_path / name for name in ("secret", "stolen", "answer"))
    secret.write_text("a private text")
    (tmp_path / "site.toml").write_text(
        f'name = "north"\nmodel = "tiny-bert"\nsuperlink = "127.0.0.1:{fleet}"\ninsecure = true\nstate = "state"\n'
    )
    bundle = hostile_bundle(tmp_path / "app", stolen, secret, answer)
    site = [*CLIENT, "--site", str(tmp_path / "site.toml"), "--skip-checks"]
    stock = [str(Path(sys.executable).with_name("flower-supernode")), "--insecure", "--superlink", f"127.0.0.1:{fleet}",
             "--host", "127.0.0.1", "--port", str(free_port())]  # fmt: skip
    with Processes(tmp_path / "logs", here.env) as processes:
        where = ["--port", str(port), "--sites", f"127.0.0.1:{fleet}", "--stream", f"127.0.0.1:{stream}", "--insecure"]
        processes.start("superlink", [COMMAND, "superlink", *where, "--state", str(tmp_path / "coordinator")])
        processes.wait_for_port("superlink", port, 60)
        processes.wait_for_port("superlink", fleet, 60)
        processes.start("north", site if guarded else stock)
        here.run(str(Path(sys.executable).with_name("flwr")), "run", str(bundle), "coordinator")
        end = time.monotonic() + 150
        while not answer.exists() and time.monotonic() < end:
            time.sleep(0.5)
        assert answer.exists(), processes.tail("north", 40)
    assert stolen.exists() != guarded  # Flower's own SuperNode runs it
    assert not guarded or "is not the fedstill that is installed here" in answer.read_text()


def test_a_registered_site_takes_part_and_a_stranger_is_refused(tmp_path: Path, small_file: Path) -> None:
    port, fleet, stream, health = free_port(), free_port(), free_port(), free_port()
    here = Coordinator(tmp_path)
    here.fedstill("certs", "new", "--host", "127.0.0.1", "--host", "localhost")
    north, stranger = here.site("north", fleet), here.site("stranger", fleet)
    with Processes(tmp_path / "logs", here.env) as processes:
        where = ["--port", str(port), "--sites", f"127.0.0.1:{fleet}", "--stream", f"127.0.0.1:{stream}"]
        where += ["--health", f"127.0.0.1:{health}"]
        files = [
            "--site-certificates",
            "--certificates",
            str(tmp_path / "certificates"),
            "--state",
            str(tmp_path / "coordinator"),
        ]
        processes.start("superlink", [COMMAND, "superlink", *where, *files])
        processes.wait_for_port("superlink", port, 60)
        processes.wait_for_port("superlink", fleet, 60)
        assert healthy(f"127.0.0.1:{health}")
        said = here.fedstill("keys", "register", str(north.with_name("site.key.pub")), "north")
        assert "north is registered as node" in said
        said = here.run(*CLIENT, "--site", str(stranger), "--check", code=1)
        assert "1 of the checks failed: registered." in said
        assert "the SuperLink does not know this key, SHA256:" in said
        assert "within 1 s of the SuperLink's" in said
        assert "trusted until" in said
        key, authority = read_key(north.with_name("site.key")), north.with_name("ca.crt")
        taken = [knock(f"127.0.0.1:{fleet}", authority, key, ahead).in_time for ahead in (-400, -60, 0, 60)]
        assert taken == [False, True, True, False]  # so wide is Flower's window, and no wider
        processes.start("stranger", [*CLIENT, "--site", str(stranger), "--skip-checks"])
        processes.start("north", [*CLIENT, "--site", str(north)])
        changes = ["rounds=1", "method.distill_epochs=1", "data.public=16", "report.alone=false"]
        changes += ["report.centralized=false", "report.evaluate=end", "exchange.sites=1"]
        options = [option for change in changes for option in ("--set", change)]
        assert "finished:completed" in here.fedstill("run", str(small_file), "--on", "coordinator", *options)
        assert processes.running["stranger"].wait(30) == 1
        assert "Failed to activate SuperNode" in processes.tail("stranger", 200)
        assert "ok      registered" in processes.tail("north", 200)
        [listed] = json.loads(here.fedstill("keys", "list", "--json"))
        assert (listed["name"], listed["status"]) == ("north", "online")
        [run] = [entry for entry in (tmp_path / "coordinator/runs").iterdir() if (entry / "summary.json").is_file()]
        summary = json.loads((run / "summary.json").read_text())
        assert summary["status"] == "finished"
        assert list(summary["sites"]) == ["north"]
        sent = json.loads((tmp_path / "north/state/north/sent.json").read_text())
        left = [json.loads(line) for line in (tmp_path / "north/state/north/ledger.jsonl").read_text().splitlines()]
        answers = [line for line in left if "arrays" in line]
        assert sent["runs"][run.name] == sum(line["bytes"] for line in answers)
        arrays = sum(kind["bytes"] for line in answers for kind in line["arrays"].values())
        travelled = summary["sites"]["north"]["bytes_up"]
        assert arrays < travelled < arrays + 128 * len(answers)  # the rest is heads
        here.fedstill("keys", "new", str(tmp_path / "north/next.key"))
        here.fedstill("keys", "rotate", str(tmp_path / "north/next.key.pub"), "north")
        keys = [read_key(tmp_path / "north" / name) for name in ("site.key", "next.key")]
        known = [knock(f"127.0.0.1:{fleet}", authority, one).known for one in keys]
        assert known == [False, True]  # by the SuperLink itself: the old key is shut out, the new one let in
        [listed] = json.loads(here.fedstill("keys", "list", "--json"))
        assert listed["name"] == "north"
        here.fedstill("keys", "revoke", "north")
        assert json.loads(here.fedstill("keys", "list", "--json")) == []
