"""A federation on this machine: real processes, Flower's simulation, or one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedstill.common.config import RunConfig

Watch = Callable[[dict[str, Any]], None]
HERE = ("process", "local", "simulation")


class RunFailed(RuntimeError):
    """The run did not finish; the text says why, as far as known."""


def start(
    config: RunConfig,
    folder: Path,
    on: str,
    *,
    resume: bool = False,
    watch: Watch = lambda event: None,
    secure: bool = False,
) -> None:
    """Check and run a federation in `folder`; `watch` gets every event, and before the first what is being started.

    Returns only if the run really finished.
    """
    from fedstill.deploy.launch.checks import check_run

    check_run(config, on)
    if on == "process":
        from fedstill.deploy.launch.process import run_in_process

        run_in_process(config, folder, resume, watch)
    else:
        from fedstill.deploy.launch.local import run_here

        run_here(config, folder, on, resume, watch, secure)
