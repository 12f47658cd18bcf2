"""A site's ledger against itself, and against what a run's record says it had come to."""

from __future__ import annotations

import json
from pathlib import Path

from fedstill.client.release.ledger import LedgerError, verify
from fedstill.server.countersign import is_signed


def check_ledger(path: Path, site: str, record: Path | None = None, certificate: Path | None = None) -> str:
    """Verify the chain, and the heads that a run's events.jsonl has of this site; return what was found, in words."""
    lines, head = verify(path)
    found = f"{path}: {lines} lines, unbroken; its head is {head}"
    if record is None:
        return found
    run, rounds = record.resolve().parent.name, 0
    for line in record.read_text(encoding="utf-8").splitlines():
        event = json.loads(line)
        if event.get("event") != "ledgers" or site not in event["heads"]:
            continue
        verify(path, event["heads"][site])
        if certificate is not None and not is_signed(
            certificate, event.get("signature", ""), run, event["round"], event["heads"]
        ):
            raise LedgerError(f"{record}: the heads of round {event['round']} are not signed by {certificate}")
        rounds += 1
    signed = "signed by the coordinator" if certificate else "its signatures were not checked"
    return f"{found}\n{record}: has the heads of {rounds} rounds, and this ledger holds them; {signed}"
