"""The ledger of what left the site: one line a Reply, in the site's state folder, written before the Reply is sent."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

from fedstill.common.checkpoint import append_line
from fedstill.common.wire import Ask, Facts, Reply, size_of


class LedgerError(RuntimeError):
    """The ledger cannot be written, so nothing may leave; the text names the file."""


class Ledger:
    """`ledger.jsonl`, append-only, across all runs of a site."""

    def __init__(self, path: Path, run: str) -> None:
        self.path, self.run = path, run

    def joined(self, greeting: Facts) -> None:
        """Record that the site joined a run, and its greeting."""
        self._write({"verb": "join", "says": greeting, "bytes": size_of({}, greeting)})

    def leaves(self, ask: Ask, reply: Reply, privacy: Facts | None = None) -> None:
        """Record a Reply before it leaves: its arrays by shape and bytes, its metrics in full, the budget after it."""
        arrays = {
            name: {"type": value.dtype.name, "shape": list(value.shape), "bytes": value.nbytes}
            for name, value in reply.arrays.items()
        }
        sizes = {"metrics": reply.metrics, "bytes": reply.size, "privacy": privacy}
        place = {"verb": ask.verb, "round": ask.settings.get("round"), "step": ask.settings.get("step")}
        self._write({**place, "arrays": arrays, **sizes})

    def refused(self, ask: Ask, error: Exception) -> None:
        """Record an Ask that was refused; only the reason leaves the site."""
        reason = f"{type(error).__name__}: {error}"[:2000]
        place = {"verb": ask.verb, "round": ask.settings.get("round"), "step": ask.settings.get("step")}
        self._write({**place, "refused": reason, "bytes": size_of({}, {"reason": reason})})

    def _write(self, facts: Facts) -> None:
        line = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "run": self.run, **facts}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            append_line(self.path, json.dumps(line, separators=(",", ":"), default=str), 0o600)
        except OSError as error:
            raise LedgerError(
                f"{self.path}: cannot be written ({error.strerror}), and nothing leaves this site without its line; "
                "free some space or check the folder's permissions"
            ) from None
