"""Child processes that never outlive their parent: each with its own log, ended by id on every exit."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

import psutil

_PR_SET_CHILD_SUBREAPER = 36


class ProcessError(RuntimeError):
    """A process failed to start or ended early; the text has the end of its log."""


def free_port() -> int:
    """Return a loopback port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def alive(pid: int) -> bool:
    """Return whether a process still runs; a zombie does not."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def tied(command: Sequence[str], ending: str = "TERM") -> list[str]:
    """Return the command so that its process gets this signal when the thread that starts it dies.

    util-linux's setpriv arranges it in the new process. Python would have to run code between fork and exec instead,
    where a parent with gRPC's threads can abort its child. A parent that died before that sends no signal: the shell
    then finds itself with another parent, and does not begin.
    """
    setpriv = shutil.which("setpriv") if sys.platform == "linux" else None
    if setpriv is None:
        return list(command)
    if_not_orphaned = 'test "$PPID" = "$0" && exec "$@"'
    return [setpriv, "--pdeathsig", ending, "sh", "-c", if_not_orphaned, str(os.getpid()), *command]


class Processes:
    """The processes of one federation on this machine."""

    def __init__(self, logs: Path, environment: Mapping[str, str]) -> None:
        self.logs, self.environment = logs, dict(environment)
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        logs.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Processes:
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # adopt grandchildren whose parent died first, to end them too
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def start(self, name: str, command: Sequence[str], extra: Mapping[str, str] | None = None) -> int:
        """Start a command with its output in logs/NAME.log; return its process id."""
        with (self.logs / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(
                tied(command),
                env={**self.environment, **(extra or {})},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return self.running[name].pid

    def wait_for_port(self, name: str, port: int, seconds: float) -> None:
        """Wait until the process listens; if it ends first, raise with the end of its log."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.check(name)
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 0.5):
                return
            time.sleep(0.1)
        raise ProcessError(f"{name} does not listen on port {port} after {seconds:.0f} s:\n{self.tail(name)}")

    def check(self, name: str) -> None:
        """Raise if the process has ended."""
        code = self.running[name].poll()
        if code is not None:
            raise ProcessError(f"{name} ended with code {code}:\n{self.tail(name)}")

    def tail(self, name: str, lines: int = 15) -> str:
        """Return the last lines of a process's log."""
        with contextlib.suppress(OSError):
            text = (self.logs / f"{name}.log").read_text(encoding="utf-8", errors="replace")
            return "\n".join(f"  | {line}" for line in text.splitlines()[-lines:])
        return "  | (no log)"

    def end(self, grace: float = 5.0) -> None:
        """End every process and all descendants: first terminate, then kill."""
        family = _descendants([p.pid for p in self.running.values()])
        for process in family:
            with contextlib.suppress(psutil.Error):
                process.terminate()
        psutil.wait_procs(family, timeout=grace)
        strays = {p.pid: p for p in [*family, *_descendants([p.pid for p in self.running.values()]), *_orphans(family)]}
        for process in strays.values():
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(list(strays.values()), timeout=grace)
        for child in self.running.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(timeout=grace)
        self.running.clear()


def run_to_end(command: Sequence[str], environment: Mapping[str, str], grace: float = 5.0) -> int:
    """Run a command in the foreground, forwarding signals; nothing that it started outlives it.

    A SuperNode that is refused leaves its SuperExec behind, which would keep trying to connect for ever.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    child = subprocess.Popen(tied(command), env=dict(environment), start_new_session=True)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda received, frame: child.send_signal(received))
    code = child.wait()
    strays = psutil.Process().children(recursive=True)
    for process in strays:
        with contextlib.suppress(psutil.Error):
            process.terminate()
    for process in psutil.wait_procs(strays, timeout=grace)[1]:
        with contextlib.suppress(psutil.Error):
            process.kill()
    return code if code >= 0 else 128 - code


def _descendants(pids: Sequence[int]) -> list[psutil.Process]:
    members: dict[int, psutil.Process] = {}
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            for member in [process, *process.children(recursive=True)]:
                members[member.pid] = member
    return list(members.values())


def _orphans(family: Sequence[psutil.Process]) -> list[psutil.Process]:
    """Return processes adopted when their parent ended (this process reaps orphans), with their descendants."""
    sessions = {process.pid for process in family}
    orphans = []
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(OSError, psutil.Error):
                if child.pid in sessions or os.getsid(child.pid) in sessions:
                    orphans.append(child)
    return orphans
