"""What a site releases, whatever the coordinator asks for: kinds of answers, verbs, bytes per run and per day."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedstill.common.checkpoint import write_atomically
from fedstill.common.config import ConfigError, RunConfig, SiteConfig
from fedstill.common.lock import taking_turns
from fedstill.common.readable import plain
from fedstill.common.wire import Ask, Reply
from fedstill.common.wire.typed import undeclared
from fedstill.strategies import VERBS, all_verbs
from fedstill.strategies.verbs import Verb

MB = 1_000_000
log = logging.getLogger("flwr")


class Refused(RuntimeError):
    """The site's own limits forbid this answer; the text says which one."""


class NotCounted(RuntimeError):
    """The byte count cannot be written, so nothing may leave; the text names the file."""


def check_files(config: RunConfig, site: SiteConfig) -> None:
    """Refuse a run that names files on this site's disk which the site itself does not name."""
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
    """Checks every answer between node and coordinator; keeps the byte count in the site's state folder."""

    def __init__(
        self,
        site: SiteConfig,
        run: str,
        folder: Path,
        answer: Callable[[Ask], Reply],
        announced: Collection[str] | None = None,
        rounds: int | None = None,
    ) -> None:
        self.site, self.run, self.folder = site, run, folder
        self.announced, self.rounds = announced, rounds  # what a run that had to be approved may ask, and how long
        self._answer = answer

    def answer(self, ask: Ask) -> Reply:
        """Return the node's answer if the limits allow it, checked before and after it is computed."""
        try:
            verb = self._allowed(ask.verb)
            number = ask.settings.get("round", 0)
            if self.rounds is not None and (type(number) is not int or number > self.rounds):
                raise Refused(f"the run was announced with {self.rounds} rounds")
            limits = self.site.limits
            counted = limits.mb_per_run is not None or limits.mb_per_day is not None
            if counted:
                self._spend(0)  # refuse before computing if a limit is already reached
            reply = self._answer(ask)
            self._check_declared(verb, reply)
            if counted:
                self._spend(reply.size)
        except Refused as error:
            raise self._noted(ask, error) from None
        return reply

    def _allowed(self, name: str) -> Verb:
        """Return the verb, or refuse if the limits forbid its answers."""
        limits = self.site.limits
        if self.announced is not None and name not in self.announced:
            raise Refused(f"the run was announced without it; its method asks {', '.join(self.announced)}")
        if limits.verbs is not None and name not in limits.verbs:
            raise Refused(f"limits.verbs has only {', '.join(limits.verbs) or 'nothing'}")
        verb = VERBS.get(name) or all_verbs().get(name)
        if verb is None:
            raise Refused("no method that is installed here has this verb")
        for kind in verb.leaves:
            if kind not in limits.leave:
                only = ", ".join(limits.leave) or "nothing"
                raise Refused(f"the answer holds {kind}, and limits.leave has only {only}")
        return verb

    def _check_declared(self, verb: Verb, reply: Reply) -> None:
        """Refuse arrays that the verb does not declare, whatever its function returned."""
        extra = undeclared(verb.answer, (name.removesuffix(".bounds") for name in reply.arrays))
        if extra:
            raise Refused(f"the answer holds {extra[0]!r}, and {verb.name} does not declare it")

    def _spend(self, size: int) -> None:
        """Count bytes before they leave, or refuse them; with 0, only check that some room is left."""
        limits, day = self.site.limits, f"{datetime.now(UTC):%Y-%m-%d}"
        with self._tally() as tally:
            runs, days = tally.setdefault("runs", {}), tally.setdefault("days", {})
            for key, most, sent in (
                ("mb_per_run", limits.mb_per_run, runs.get(self.run, 0)),
                ("mb_per_day", limits.mb_per_day, days.get(day, 0)),
            ):
                if most is not None and (sent >= round(most * MB) or sent + size > round(most * MB)):
                    raise Refused(f"{sent / MB:.3f} MB left, {size / MB:.3f} more would; limits.{key} is {most:g}")
            runs[self.run] = runs.get(self.run, 0) + size
            tally["days"] = {day: days.get(day, 0) + size}

    @contextmanager
    def _tally(self) -> Iterator[dict[str, Any]]:
        """Yield the byte counts so far; write them back unless the answer is refused. Runs of one site take turns."""
        path = self.folder / "sent.json"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with taking_turns(self.folder / "sent.lock"):
                tally = json.loads(path.read_text()) if path.exists() else {}
                yield tally
                write_atomically(path, json.dumps(tally))
        except OSError as error:
            raise NotCounted(
                f"{path}: cannot be written ({error.strerror}), and nothing leaves this site uncounted; free some "
                "space or check the folder's permissions"
            ) from None

    def _noted(self, ask: Ask, error: Refused) -> Refused:
        """Log a refusal at the site and return it for the coordinator."""
        verb = plain(ask.verb, 200)  # the coordinator's word, on its way to this site's log
        log.warning("site %s refuses %s of run %s: %s", self.site.name, verb, self.run, error)
        return Refused(
            f"site {self.site.name} refuses {verb}: {error}. Only the site's owner can change that, in site.toml; "
            "a method that needs no such answer is in docs/methods"
        )
