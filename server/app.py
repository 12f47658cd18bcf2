"""The coordinator's Flower ServerApp: configuration -> method -> run."""

from __future__ import annotations

import logging
import os
import sys
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedstill import __file__ as package
from fedstill.common.config import ConfigError, ExchangeConfig, RunConfig
from fedstill.common.config.files import load_run
from fedstill.common.lock import only_one
from fedstill.common.memory import imports_stay
from fedstill.server.federation import Federation
from fedstill.server.record import RunStopped, recorded

app = ServerApp()
_FROM_ENV = ("certificate", "key", "authority", "listen", "advertise", "metrics")
_BUSY = (
    "{folder}: another ServerApp works on this run, and this one leaves it alone; `flwr list coordinator` shows it. To "
    "start it again: flwr stop RUN coordinator, then fedstill resume"
)


class RunBusy(RuntimeError):
    """The run is already running and cannot be resumed."""


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the federation described by the run configuration."""
    imports_stay()
    settings = context.run_config
    config = with_environment(load_run(str(settings["config"]), root=Path(package).resolve().parent.parent))
    folder = run_folder(config, str(settings["run-folder"]))
    run_federation(grid, config, folder, bool(settings["resume"]))


def run_federation(grid: Grid, config: RunConfig, folder: Path, resume: bool) -> None:
    """Run and record the run; if it fails, the reason is in its events and summary before Flower sees the error."""
    logging.getLogger("flwr").info("run folder: %s", folder)
    busy = RunBusy(_BUSY.format(folder=folder))
    with (
        suppress(RunStopped),  # for Flower a run that was stopped on request is over, and well
        only_one(folder / "running.lock", busy),
        recorded(config, folder, resume) as record,
    ):
        federation = Federation(config, record)
        federation.method.start(grid, federation=federation, resume=resume)


def with_environment(config: RunConfig) -> RunConfig:
    """Apply the coordinator's FEDSTILL_ variables; a SuperLink with TLS requires a stream with TLS."""
    exchange = config.exchange
    env = {name: os.environ.get(f"FEDSTILL_{name.upper()}") for name in _FROM_ENV}
    changes = {
        name: Path(value) if name in ("certificate", "key", "authority") else value
        for name, value in env.items()
        if value and getattr(exchange, name) == ExchangeConfig.model_fields[name].default
    }
    exchange = exchange.model_copy(update=changes)
    if "--root-certificates" in sys.argv and exchange.link == "stream" and exchange.certificate is None:
        raise ConfigError(
            "the SuperLink has TLS, so the stream must have it too: set exchange.certificate and exchange.key, or "
            "start the SuperLink with FEDSTILL_CERTIFICATE and FEDSTILL_KEY (the SuperLink's own pair will do)"
        )
    return config.model_copy(update={"exchange": exchange})


def run_folder(config: RunConfig, given: str) -> Path:
    """Return an absolute path as given; a bare name, or none, lies under $FEDSTILL_RUNS (default ~/.fedstill/runs)."""
    if Path(given).is_absolute():
        return Path(given)
    root = Path(os.environ.get("FEDSTILL_RUNS") or Path.home() / ".fedstill" / "runs")
    return root / (given or f"{config.name}-{datetime.now(UTC):%Y%m%d-%H%M%S}")
