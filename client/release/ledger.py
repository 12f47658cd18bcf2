"""The ledger of what left the site: one line a Reply, on disk before the Reply is sent, chained by hashes.

Each line has the hash of the line before it, so that none can be changed, taken out or put in between unseen: whoever
knows a later hash (the run's record has one of every round) can tell. A salt keeps a hash from telling what it is of.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from datetime import UTC, datetime
from pathlib import Path

from fedstill.common.checkpoint import OWNER, append_line
from fedstill.common.lock import taking_turns
from fedstill.common.wire import Ask, Facts, Reply, size_of

START = "0" * 64  # before the first line
TAIL = 1 << 16  # bytes from the end in which the last line is looked for first


class LedgerError(RuntimeError):
    """The ledger cannot be written, so nothing may leave; the text names the file."""


class Ledger:
    """`ledger.jsonl`, append-only, across all runs of a site; processes of one site take turns."""

    def __init__(self, path: Path, run: str) -> None:
        self.path, self.run = path, run
        self.synced = True  # on disk before anything leaves; off where nothing does, in a run of one process
        self._known = (0, START)  # size of the file and hash of its last line, as this process left it

    def joined(self, greeting: Facts) -> None:
        """Record that the site joined a run, and its greeting."""
        self._write({"verb": "join", "says": greeting, "bytes": size_of({}, greeting)})

    def not_joined(self, error: Exception) -> None:
        """Record that the site refused a run, or could not take part in it."""
        self._write({"verb": "join", "refused": f"{type(error).__name__}: {error}"[:2000]})

    def approved(self, announcement: Facts) -> None:
        """Record that the site's owner approved a run, with what was announced."""
        self._write({"verb": "approve", "says": announcement})

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

    def head(self) -> str:
        """Return the hash of the last line: it stands for the whole ledger up to here."""
        size = self.path.stat().st_size if self.path.exists() else 0
        if size != self._known[0]:
            self._known = (size, _digest(_last_line(self.path, size)) if size else START)
        return self._known[1]

    def _write(self, facts: Facts) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with taking_turns(self.path.with_suffix(".lock")):
                now = datetime.now(UTC).isoformat(timespec="milliseconds")
                links = {"salt": secrets.token_hex(8), "before": self.head()}
                line = {"time": now, "run": self.run, **facts, **links}
                text = json.dumps(line, separators=(",", ":"), default=str)
                append_line(self.path, text, OWNER, self.synced)
                self._known = (self.path.stat().st_size, _digest(text.encode()))
        except OSError as error:
            raise LedgerError(
                f"{self.path}: cannot be written ({error.strerror}), and nothing leaves this site without its line; "
                "free some space or check the folder's permissions"
            ) from None


def verify(path: Path, head: str | None = None) -> tuple[int, str]:
    """Return the number of lines and the last hash; a LedgerError names the first line that breaks the chain.

    With `head`, the ledger must also hold the line of that hash, such as one from a run's record.
    """
    before, count, met = START, 0, head is None
    try:
        with path.open("rb") as file:
            for count, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    raise LedgerError(f"{path}: line {count} is cut off")
                try:
                    linked = json.loads(line)["before"] == before
                except (ValueError, KeyError, TypeError):
                    linked = False
                if not linked:
                    raise LedgerError(
                        f"{path}: line {count} does not follow from the line before it: one of them was changed, or "
                        "lines are missing"
                    )
                before = _digest(line[:-1])
                met = met or before == head
    except OSError as error:
        raise LedgerError(f"{path}: cannot be read ({error.strerror})") from None
    if not met:
        raise LedgerError(
            f"{path}: no line has the hash {str(head)[:16]}..., which the run's record has: its end was taken off"
        )
    return count, before


def _digest(line: bytes) -> str:
    return hashlib.sha256(line).hexdigest()


def _last_line(path: Path, size: int) -> bytes:
    with path.open("rb") as file:
        back = min(size, TAIL)
        while True:
            file.seek(size - back)
            lines = file.read(back).rstrip(b"\n").split(b"\n")
            if len(lines) > 1 or back == size:
                return lines[-1]
            back = min(size, 2 * back)
