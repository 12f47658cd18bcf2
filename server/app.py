"""The coordinator's Flower ServerApp: configuration -> method -> run."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from logging import INFO
from pathlib import Path

from flwr.app import Context
from flwr.common.logger import log
from flwr.serverapp import Grid, ServerApp

from fedstill import __file__ as package
from fedstill.common.config import ConfigError, ExchangeConfig, RunConfig
from fedstill.common.config.files import load_run
from fedstill.common.lock import only_one
from fedstill.common.wire import Facts
from fedstill.common.wire.spool import Spool
from fedstill.server.central import Student
from fedstill.server.holder import make_student
from fedstill.server.link import Link, MessageLink, StreamLink
from fedstill.server.record import Record, RecordError
from fedstill.strategies import find_method

app = ServerApp()
GREETING: dict[str, type] = {  # what a site says of itself, and how
    "family": str,
    "model": str,
    "parameters": int,
    "travelling": int,
    "texts": int,
    "public_texts": int,
    "rounds": list,
}

_BUSY = (
    "{folder}: another ServerApp works on this run, and this one leaves it alone; `flwr list coordinator` shows it. To "
    "start it again: flwr stop RUN coordinator, then fedstill resume"
)


class RunBusy(RuntimeError):
    """A run that was resumed while it runs."""


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the federation that the run configuration describes."""
    settings = context.run_config
    config = with_environment(load_run(str(settings["config"]), root=Path(package).resolve().parent.parent))
    folder = run_folder(config, str(settings["run-folder"]))
    run_federation(grid, config, folder, bool(settings["resume"]))


def run_federation(grid: Grid, config: RunConfig, folder: Path, resume: bool) -> None:
    """One run, with its record; a run that fails says why in its events and summary before Flower hears of it."""
    log(INFO, "run folder: %s", folder)
    with only_one(folder / "running.lock", RunBusy(_BUSY.format(folder=folder))):
        _work(grid, config, Record(folder, config), resume)


def _work(grid: Grid, config: RunConfig, record: Record, resume: bool) -> None:
    folder = record.folder
    record.event("run_started", run=folder.name, method=config.method.name, resume=resume, pid=os.getpid())
    try:
        kind, params = find_method(config.method)
        student = make_student(config)
        method = kind(params, config, student, record)

        def open_link(grid: Grid) -> Link:
            about = (grid, config, folder.name, admission(config, student), _notices(record))
            return StreamLink(*about, Spool(folder)) if config.exchange.link == "stream" else MessageLink(*about)

        method.start(grid, link=open_link, resume=resume)
    except BaseException as error:
        reason = f"{type(error).__name__}: {error}"
        with contextlib.suppress(RecordError):  # of a disk that is full; the error itself says so in Flower's log
            record.event("run_failed", reason=reason)
            if not (folder / "summary.json").exists():
                facts = {"status": "failed", "reason": reason, "method": config.method.name, "seed": config.seed}
                record.summary(facts)
        raise


def admission(config: RunConfig, student: Student) -> Callable[[Facts], str | None]:
    """What a site must have in common with the others to be let in."""
    known = {site.name for site in config.sites}
    labels = None if config.mixed else list(student.task.labels)

    def admit(facts: Facts) -> str | None:
        name = facts.get("name")
        wrong = [key for key, kind in GREETING.items() if not isinstance(facts.get(key, kind()), kind)]
        if wrong or not isinstance(name, str) or facts.get("texts", 0) < 0:
            return f"what the site says of itself cannot be read: {', '.join(wrong) or 'name or texts'}"
        if not all(type(number) is int for number in facts.get("rounds", [])):
            return "what the site says of itself cannot be read: rounds"
        if known and name not in known:
            return f"site {name!r} is not in this run; its sites are: {', '.join(sorted(known))}"
        if facts.get("labels") != labels:
            return f"site {name}: labels {facts.get('labels')} in this order, the run has {labels}; order them alike"
        if facts.get("public") != student.fingerprint:
            return (
                f"site {name}: another public set (sha256 {str(facts.get('public'))[:16]}..., "
                f"{facts.get('public_texts')} texts) than the coordinator's ({student.fingerprint[:16]}..., "
                f"{len(student.public)} texts); load the same texts in the same order on both sides"
            )
        return None

    return admit


def with_environment(config: RunConfig) -> RunConfig:
    """Certificates that the coordinator's start gave, and the check that a secured SuperLink has a secured stream."""
    exchange = config.exchange
    found = {name: os.environ.get(f"FEDSTILL_{name.upper()}") for name in ("certificate", "key", "listen", "advertise")}
    changes = {
        name: Path(value) if name in ("certificate", "key") else value
        for name, value in found.items()
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
    """An absolute path as given; a bare name, or none, lies under $FEDSTILL_RUNS (default ~/.fedstill/runs)."""
    if Path(given).is_absolute():
        return Path(given)
    root = Path(os.environ.get("FEDSTILL_RUNS") or Path.home() / ".fedstill" / "runs")
    return root / (given or f"{config.name}-{datetime.now(UTC):%Y%m%d-%H%M%S}")


def _notices(record: Record) -> Callable[[str, Facts], None]:
    def notice(kind: str, facts: Facts) -> None:
        record.event(kind, **facts)
        log(INFO, "%s: %s", kind, facts)

    return notice
