"""Child processes: none outlives the process that started it, however that ends."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from fedstill.deploy.processes import Processes, alive, tied

STARTS_ONE = """
import pathlib, sys, time
from fedstill.deploy.processes import Processes
print(Processes(pathlib.Path(sys.argv[1]), {}).start("child", ["sleep", "100"]), flush=True)
time.sleep(100)
"""


DIES_FIRST = """
import os, sys
from fedstill.deploy.processes import tied
command, parent = tied(["touch", sys.argv[1]]), os.getpid()
if os.fork() == 0:
    while os.getppid() == parent:
        pass
    os.execv(command[0], command)
"""

linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child that its parent died")


@linux
def test_a_child_whose_parent_died_before_it_was_tied_does_not_begin(tmp_path: Path) -> None:
    orphan = subprocess.run([sys.executable, "-c", DIES_FIRST, str(tmp_path / "orphan")], capture_output=True)
    assert (orphan.returncode, orphan.stderr) == (0, b"")  # all ends of the pipe are closed: the child is gone too
    assert not (tmp_path / "orphan").exists()
    subprocess.run(tied(["touch", str(tmp_path / "child")]), check=True)
    assert (tmp_path / "child").exists()


@linux
def test_a_child_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    parent = subprocess.Popen([sys.executable, "-c", STARTS_ONE, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert alive(child)
    parent.kill()
    parent.communicate()
    end = time.monotonic() + 20
    while alive(child):
        assert time.monotonic() < end, "the child of a killed process goes on"
        time.sleep(0.05)


def test_a_child_has_the_id_and_the_output_of_its_own_command(tmp_path: Path) -> None:
    with Processes(tmp_path, {}) as processes:
        pid = processes.start("child", [sys.executable, "-c", "import os; print(os.getpid())"])
        assert processes.running["child"].wait(60) == 0
    assert int((tmp_path / "child.log").read_text()) == pid


def test_without_setpriv_a_command_is_started_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert tied(["sleep", "1"]) == ["sleep", "1"]
