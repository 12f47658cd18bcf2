"""Flower's app processes forked from one that has imported everything: on one machine five starts cost little over one.

A SuperNode starts a new `flwr-clientapp`, the SuperLink a new `flwr-serverapp`; each would spend four CPU seconds on
importing torch, transformers and Flower. The commands that `write_commands` puts before Flower's on the PATH hand their
arguments, environment and output to the process here, which forks: the fork runs Flower's own command. It ends when the
command that asked for it ends, and the command ends with it. Nothing of a run is in the process before it forks.
"""

from __future__ import annotations

import array
import contextlib
import importlib
import json
import os
import random
import signal
import socket
import sys
import threading
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

COMMANDS = ("flwr-clientapp", "flwr-serverapp")
NEEDED = (
    "fedstill.client.app",
    "fedstill.server.app",
    "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    *(f"transformers.models.{family}.modeling_{family}" for family in ("bert", "roberta", "xlnet", "t5")),
)
LONGEST = 1 << 20  # bytes of a command's arguments and environment
_COMMAND = """#!{python} -IS
import array, json, os, socket, sys
line = socket.socket(socket.AF_UNIX)
try:
    line.connect({path!r})
except OSError:
    os.execv({stock!r}, [{stock!r}, *sys.argv[1:]])
asked = json.dumps([sys.argv, dict(os.environ), os.getcwd()]).encode()
line.sendmsg([len(asked).to_bytes(4, "big")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))])
line.sendall(asked)
code = line.recv(1)  # comes with its end
sys.exit(code[0] if code else 1)
"""


def write_commands(folder: Path, path: Path) -> Path:
    """Write the commands that ask the process listening at `path`; return their folder, for the front of a PATH."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    for name in COMMANDS:
        stock = str(Path(sys.executable).parent / name)
        (folder / name).write_text(_COMMAND.format(python=sys.executable, path=str(path), stock=stock))
        (folder / name).chmod(0o700)
    return folder


def serve(path: Path) -> None:
    """Listen at once, import everything, then fork for every command that asks; until killed."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen(64)  # who comes before the imports are done waits here
    scripts = {name: entry_points(group="console_scripts")[name].load() for name in COMMANDS}
    for module in NEEDED:
        importlib.import_module(module)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody here waits for a fork
    while True:
        line, _ = listener.accept()
        with line, contextlib.suppress(OSError, ValueError):
            (arguments, environment, folder), files = _asked(line)
            if os.fork() == 0:
                listener.close()
                _become(line, scripts[Path(arguments[0]).name], arguments, environment, folder, files)
            for file in files:
                os.close(file)


def _asked(line: socket.socket) -> tuple[Any, list[int]]:
    """Read a command's arguments, environment, folder, and its standard files."""
    files = array.array("i")
    head, parts, *_ = line.recvmsg(4, socket.CMSG_SPACE(3 * files.itemsize))
    for _level, _kind, data in parts:
        files.frombytes(data)
    size, text = int.from_bytes(head, "big"), b""
    if not 0 < size <= LONGEST or len(files) != 3:
        raise ValueError("this is no command")
    while len(text) < size and (more := line.recv(size - len(text))):
        text += more
    return json.loads(text), list(files)


def _become(
    line: socket.socket,
    script: Callable[[], Any],
    arguments: list[str],
    environment: dict[str, str],
    folder: str,
    files: list[int],
) -> None:
    """Be the command from now on."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = arguments
    random.seed()  # or all forks would draw alike
    threading.Thread(target=_end_with, args=(line,), daemon=True).start()
    code = 1
    try:
        ended = script()
        code = ended if isinstance(ended, int) else 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        with contextlib.suppress(OSError):
            line.send(bytes([code & 0xFF]))
        os._exit(code)


def _end_with(line: socket.socket) -> None:
    """End as soon as the command that asked is gone."""
    with contextlib.suppress(OSError):
        line.recv(1)
    os._exit(1)


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
