"""Commands forked from a process that is ready: they are Flower's own, with their own arguments, files and ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from fedstill.deploy.launch.warm import write_commands

STAND_IN = """
import sys
from pathlib import Path
from fedstill.deploy.launch import warm

def command():
    import os, sys, time
    print(sys.argv[1:], os.environ.get("OWN"), os.getcwd(), os.getpid(), flush=True)
    print("said", file=sys.stderr, flush=True)
    if "wait" in sys.argv:
        time.sleep(60)
    sys.exit(7)

class Script:
    def load(self):
        return command

warm.NEEDED = ()
warm.entry_points = lambda group: dict.fromkeys(warm.COMMANDS, Script())
warm.serve(Path(sys.argv[1]))
"""


@pytest.fixture
def commands() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        line = Path(folder) / "apps"
        process = subprocess.Popen([sys.executable, "-c", STAND_IN, str(line)])
        while not line.exists():
            assert process.poll() is None
            time.sleep(0.05)
        yield write_commands(Path(folder) / "commands", line)
        process.kill()
        process.wait()


def test_a_fork_has_the_commands_arguments_environment_files_and_code(commands: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [commands / "flwr-clientapp", "--token", "a b"],
        env={"OWN": "mine"}, cwd=tmp_path, capture_output=True, text=True, timeout=30,
    )  # fmt: skip
    assert done.returncode == 7
    assert done.stdout.startswith(f"['--token', 'a b'] mine {tmp_path} ")
    assert done.stderr == "said\n"


def test_a_fork_ends_when_its_command_is_killed(commands: Path) -> None:
    asked = subprocess.Popen([commands / "flwr-serverapp", "wait"], stdout=subprocess.PIPE, text=True)
    assert asked.stdout is not None
    fork = psutil.Process(int(asked.stdout.readline().split()[-1]))
    assert fork.pid != asked.pid
    asked.send_signal(signal.SIGKILL)
    asked.wait()
    psutil.wait_procs([fork], timeout=20)
    assert not fork.is_running() or fork.status() == psutil.STATUS_ZOMBIE


def test_without_the_process_the_stock_command_runs(tmp_path: Path) -> None:
    folder = write_commands(tmp_path / "commands", tmp_path / "nobody")
    done = subprocess.run(
        [folder / "flwr-clientapp", "--help"], env=dict(os.environ), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0
    assert "Run a Flower ClientApp" in done.stdout
