"""What is on the wire now: whom an Ask waits for, and each site's bytes, computing seconds and last answer."""

from __future__ import annotations

import time
from collections.abc import Iterable
from datetime import UTC, datetime

from fedstill.common.wire import Facts
from fedstill.server.costs import Costs
from fedstill.server.record import Record

EVERY = 1.0  # seconds between two events about quick Asks; about long ones everything is told
FEW = 32  # sites; of more, whose events are as many times longer, answers to a long Ask are told once a second too


class Pulse:
    """Writes `asked` and `traffic` events, few enough for a log and often enough for a person who watches."""

    def __init__(self, record: Record, costs: Costs) -> None:
        self.record, self.costs = record, costs
        self.seen: dict[str, str] = {}  # when a site answered last
        self._long = False
        self._told = {"asked": 0.0, "traffic": 0.0}

    def asked(self, number: int, phase: str, verb: str, sites: Iterable[str], quick: bool) -> None:
        """Tell that sites are being asked."""
        self._long = not quick
        if self._due("asked"):
            self.record.event("asked", round=number, phase=phase, verb=verb, sites=list(sites))

    def heard(self, number: int, site: str) -> None:
        """Note an answer; of a long Ask to a few sites every one is told."""
        self.seen[site] = datetime.now(UTC).isoformat(timespec="milliseconds")
        if self._long and (len(self.seen) <= FEW or time.monotonic() - self._told["traffic"] >= EVERY):
            self._tell(number)

    def done(self, number: int) -> None:
        """Tell what everybody has sent, received and computed so far."""
        if self._due("traffic"):
            self._tell(number)

    def last(self, number: int) -> None:
        """Tell how it ended, however little time has passed."""
        self._tell(number)

    def _due(self, kind: str) -> bool:
        now = time.monotonic()
        if not self._long and now - self._told[kind] < EVERY:
            return False
        self._told[kind] = now
        return True

    def _tell(self, number: int) -> None:
        self._told["traffic"] = time.monotonic()
        self.record.event("traffic", round=number, sites={name: self._facts(name) for name in self.seen})

    def _facts(self, name: str) -> Facts:
        spent = self.costs.site(name)
        return {
            "up": spent["bytes_up"],
            "down": spent["bytes_down"],
            "seconds": round(self.costs.computing.get(name, 0.0), 3),
            "seen": self.seen[name],
        }
