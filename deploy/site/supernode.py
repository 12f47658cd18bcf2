"""Flower's stock SuperNode, ended as soon as one of its threads dies.

A SuperNode whose heartbeat met an error that Flower does not expect (such as a SuperLink with a full disk) lives on
without it: it looks well, and is never asked again. Ended, it is started anew by whoever supervises it.
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
    """Say what happened, and end the process."""
    threading.__excepthook__(arguments)
    logging.getLogger("flwr").error(
        "a thread of the SuperNode died (%s); the SuperNode ends, to be started again", arguments.exc_value
    )
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(CODE)


def main() -> None:
    """`flower-supernode`, watched."""
    threading.excepthook = end_with_thread
    flower_supernode()


if __name__ == "__main__":
    main()
