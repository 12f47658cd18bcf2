"""Flower's stock SuperNode, ended as soon as one of its threads dies.

A SuperNode whose heartbeat meets an error that Flower does not expect (such as a SuperLink with a full disk) lives on
without it: it looks healthy but is never asked again. Once ended, its supervisor restarts it.
"""

from __future__ import annotations

import logging
import os
import sys
import threading

from fedstill.deploy.flower_internals import (
    flower_supernode,
)

CODE = 70  # not 0, so that systemd's Restart=on-failure sees it


def end_with_thread(arguments: threading.ExceptHookArgs) -> None:
    """Log what happened, and end the process."""
    threading.__excepthook__(arguments)
    logging.getLogger("flwr").error(
        "a thread of the SuperNode died (%s); the SuperNode ends, to be started again", arguments.exc_value
    )
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(CODE)


def main() -> None:
    """Run `flower-supernode`, watched."""
    threading.excepthook = end_with_thread
    flower_supernode()


if __name__ == "__main__":
    main()
