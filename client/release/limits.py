"""What a site lets out, whatever the coordinator asks for: kinds of answers, verbs, bytes a run and a day."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from logging import WARN
from pathlib import Path
from typing import Any

from flwr.common.logger import log

from fedstill.common.checkpoint import write_atomically
from fedstill.common.config import ConfigError, Leaving, RunConfig, SiteConfig
from fedstill.common.wire import Ask, Reply, size_of
from fedstill.common.wire.compression import PREDICTIONS

MB = 1_000_000
NOTHING: tuple[Leaving, ...] = ()

# What the answer to each verb holds beside a few numbers. A verb that is not here leaves with nobody who set a limit.
LEAVES: dict[str, tuple[Leaving, ...]] = {
    "query.predictions": ("predictions",),
    "query.logits": ("predictions",),
    "query.bias": ("predictions",),
    "query.scores": ("predictions",),
    "query.counts": ("counts",),
    "query.shapes": NOTHING,
    "query.save": NOTHING,
    "query.restore": NOTHING,
    "query.features": ("features",),
    "query.representations": ("features",),
    "query.trained": ("weights", "counts"),
    "train.local": NOTHING,  # unless its settings ask for more: see `leaving`
    "train.distil": NOTHING,
    "train.feedback": ("predictions",),
    "train.weights": NOTHING,
    "train.parameters": ("weights",),
    "train.ditto": ("weights",),
    "train.mutual": ("weights",),
    "train.change": NOTHING,
    "train.balanced": ("weights", "counts"),
    "train.corrupted": ("weights",),
    "train.shared": NOTHING,
    "train.contrast": ("weights",),
    "evaluate.test": NOTHING,
    "evaluate.alone": NOTHING,
}
EVERYTHING: tuple[Leaving, ...] = ("predictions", "counts", "features", "weights")
WEIGHTS: Leaving = "weights"
_NAMES: dict[Leaving, tuple[str, ...]] = {  # arrays by name; any other is a weight
    "predictions": (*PREDICTIONS, *(f"{name}.bounds" for name in PREDICTIONS), "items", "bias", "scores"),
    "counts": ("counts", "gamma"),
    "features": ("features", "h"),
}
_KINDS = {name: kind for kind, names in _NAMES.items() for name in names}


def kinds_of(reply: Reply) -> tuple[Leaving, ...]:
    """What the arrays of an answer are."""
    return tuple(_KINDS.get(name, WEIGHTS) for name in reply.arrays)


class Refused(RuntimeError):
    """The site's own limits forbid this answer; the text says which one."""


class NotCounted(RuntimeError):
    """The count of bytes cannot be kept, so that nothing may leave; the text names the file."""


def leaving(ask: Ask) -> tuple[Leaving, ...]:
    """What the answer to an Ask would hold."""
    found = LEAVES.get(ask.verb, EVERYTHING)
    if ask.verb == "train.local" and ask.settings.get("send_weights"):
        found = (*found, "weights")
    if ask.verb == "train.local" and ask.settings.get("describe"):
        found = (*found, "counts")  # the loss of each class shows which classes there are
    return found


def check_files(config: RunConfig, site: SiteConfig) -> None:
    """Refuse a run that would have this site read files which the run names and the site does not."""
    if site.limits.run_files:
        return
    own_texts = site.task is not None or (site.data is not None and site.data.public is not None)
    if config.mixed or (own_texts and config.task.labels is not None):
        return
    named = [f"task.{key}" for key in ("train", "test", "public", "folder") if getattr(config.task, key) is not None]
    if named:
        raise ConfigError(
            f"site {site.name}: the run names files on this site's disk ({', '.join(named)}). Name the site's own in "
            "[data] private and public and list task.labels in the run, or set limits.run_files = true in site.toml"
        )


class Gate:
    """Stands between the node and the coordinator; the count of bytes is kept in the site's state folder."""

    def __init__(self, site: SiteConfig, run: str, folder: Path, answer: Callable[[Ask], Reply]) -> None:
        self.site, self.run, self.folder = site, run, folder
        self._answer = answer

    def answer(self, ask: Ask) -> Reply:
        """The node's answer, if the limits allow it before and after it is worked out."""
        try:
            self._check_verb(ask.verb)
            self._check_kinds(leaving(ask))
            self._spend(0)  # a limit that is reached already costs no work
            reply = self._answer(ask)
            self._check_kinds(kinds_of(reply))
            self._spend(size_of(reply.arrays, {"metrics": reply.metrics}))
        except Refused as error:
            raise self._noted(ask, error) from None
        return reply

    def _check_verb(self, verb: str) -> None:
        allowed = self.site.limits.verbs
        if allowed is not None and verb not in allowed:
            raise Refused(f"limits.verbs has only {', '.join(allowed) or 'nothing'}")

    def _check_kinds(self, kinds: tuple[Leaving, ...]) -> None:
        allowed = self.site.limits.leave
        for kind in kinds:
            if kind not in allowed:
                raise Refused(f"the answer holds {kind}, and limits.leave has only {', '.join(allowed) or 'nothing'}")

    def _spend(self, size: int) -> None:
        """Count bytes before they leave, or refuse them; with 0, whether there is any room left."""
        limits, day = self.site.limits, f"{datetime.now(UTC):%Y-%m-%d}"
        if limits.mb_per_run is None and limits.mb_per_day is None:
            return
        with self._tally() as tally:
            runs, days = tally.setdefault("runs", {}), tally.setdefault("days", {})
            for key, most, sent in (
                ("mb_per_run", limits.mb_per_run, runs.get(self.run, 0)),
                ("mb_per_day", limits.mb_per_day, days.get(day, 0)),
            ):
                if most is not None and (sent >= most * MB or sent + size > most * MB):
                    raise Refused(f"{sent / MB:.3f} MB left, {size / MB:.3f} more would; limits.{key} is {most:g}")
            runs[self.run] = runs.get(self.run, 0) + size
            tally["days"] = {day: days.get(day, 0) + size}

    @contextmanager
    def _tally(self) -> Iterator[dict[str, Any]]:
        """What has left so far; written back if nothing was refused. Two runs of one site take turns."""
        path = self.folder / "sent.json"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with (self.folder / "sent.lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                tally = json.loads(path.read_text()) if path.exists() else {}
                yield tally
                write_atomically(path, json.dumps(tally))
        except OSError as error:
            raise NotCounted(
                f"{path}: cannot be written ({error.strerror}), and nothing leaves this site uncounted; free some "
                "space or check the folder's permissions"
            ) from None

    def _noted(self, ask: Ask, error: Refused) -> Refused:
        """The refusal as the coordinator hears it; the site's log has it too."""
        log(WARN, "site %s refuses %s of run %s: %s", self.site.name, ask.verb, self.run, error)
        return Refused(
            f"site {self.site.name} refuses {ask.verb}: {error}. Only the site's owner can change that, in site.toml; "
            "a method that needs no such answer is in docs/METHODS.md"
        )
