"""Tracking: a run's events as scores and costs by round, for TensorBoard, MLflow and Weights & Biases."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from fedstill.common.config import ConfigError, RunConfig

log = logging.getLogger("flwr")
Facts = Mapping[str, Any]
ENDS = {"run_finished": "finished", "run_stopped": "stopped", "run_failed": "failed"}


class Sink(Protocol):
    """Where scores go: one tool."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Take values of a round."""

    def close(self, status: str, report: Path | None) -> None:
        """The run is over: finished, stopped or failed; the report may be there."""


Open = Callable[[RunConfig, str, Path, Mapping[str, str]], Sink]  # settings, run, folder of files, parameters


class Tracking:
    """Turns events into scalars by round for every sink; a sink that fails is dropped, and the run goes on."""

    def __init__(self, sinks: Mapping[str, Sink], folder: Path) -> None:
        self.sinks, self.folder = dict(sinks), folder
        self._costs: dict[str, float] = {}  # the latest
        self._status = "failed"  # unless the run says otherwise

    def event(self, event: Facts) -> None:
        """Take one event of events.jsonl."""
        kind, step = event["event"], int(event.get("round") or 0)
        if kind == "traffic":
            for site, facts in event["sites"].items():
                self._costs |= {f"bytes_up/{site}": facts["up"], f"bytes_down/{site}": facts["down"]}
                self._costs[f"computing_seconds/{site}"] = facts["seconds"]
        values = dict(scalars_of(event))
        if kind == "round_finished":
            values |= self._costs
        if values:
            self._tell(lambda sink: sink.scalars(step, values))
        self._status = ENDS.get(kind, self._status)

    def close(self) -> None:
        """Close every sink, with how the run ended and its report."""
        report = self.folder / "report.html"
        self._tell(lambda sink: sink.close(self._status, report if report.is_file() else None))
        self.sinks.clear()

    def _tell(self, what: Callable[[Sink], None]) -> None:
        for name, sink in list(self.sinks.items()):
            try:
                what(sink)
            except Exception as error:  # of a tool that is not ours
                log.warning("tracking: %s failed and is left out from here on: %s", name, error)
                del self.sinks[name]


def scalars_of(event: Facts) -> Iterable[tuple[str, float]]:
    """Yield the numbers of an event, by name: central/accuracy, sites/north/accuracy, loss, agreement ..."""
    kind = event["event"]
    if kind in ("tested", "round_finished"):
        yield from _numbers("central", event["central"])
        for site, scores in event["sites"].items():
            yield from _numbers(f"sites/{site}", scores)
        yield from _numbers("round", event.get("metrics") or {})
    elif kind == "alone":
        for site, scores in event["sites"].items():
            yield from _numbers(f"alone/{site}", scores)
    elif kind == "centralized":
        yield from _numbers("centralized", event["metrics"])
    elif kind == "agreement":
        yield "agreement", float(event["mean"])
    elif kind == "privacy":
        for site, facts in event["sites"].items():
            yield from _numbers(f"privacy/{site}", facts)
    elif kind == "run_finished":
        yield from _numbers("seconds", event["seconds"])


def _numbers(prefix: str, facts: Facts) -> Iterable[tuple[str, float]]:
    for name, value in facts.items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{prefix}/{name}", float(value)


def open_tracking(config: RunConfig, folder: Path, to: Iterable[str] | None = None) -> Tracking | None:
    """Open the sinks that [track] names; None if there are none. A missing package is an error with its cure."""
    names = list(config.track.to if to is None else to)
    if not names:
        return None
    files = config.track.folder or folder / "track"
    files.mkdir(parents=True, exist_ok=True)
    return Tracking({name: _open(name, config, folder.name, files) for name in names}, folder)


def check_packages(config: RunConfig) -> None:
    """Refuse a run whose tracking tools are not installed."""
    for name in config.track.to:
        _module(name)


def _open(name: str, config: RunConfig, run: str, files: Path) -> Sink:
    opened: Sink = _module(name).open_sink(config, run, files, dict(_flat(json.loads(config.to_json()))))
    return opened


def _module(name: str) -> Any:
    try:
        return import_module(f"fedstill.server.tracking.{name}_sink")
    except ImportError as error:
        raise ConfigError(
            f"track.to names {name}, which is not installed here: pip install 'fedstill[{name}]' ({error})"
        ) from None


def _flat(values: Any, prefix: str = "") -> Iterable[tuple[str, str]]:
    """Yield parameters by dotted key, sites by name."""
    if isinstance(values, dict):
        for key, value in values.items():
            yield from _flat(value, f"{prefix}.{key}" if prefix else key)
    elif isinstance(values, list) and values and all(isinstance(value, dict) and "name" in value for value in values):
        for value in values:
            yield from _flat({k: v for k, v in value.items() if k != "name"}, f"{prefix}.{value['name']}")
    else:
        yield prefix, str(values)
