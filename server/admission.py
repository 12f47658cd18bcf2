"""Admission to a run: a site's greeting, and what it must have in common with the other sites."""

from __future__ import annotations

from fedstill.common.config import RunConfig
from fedstill.common.wire import Facts
from fedstill.server.central import CentralModel

GREETING: dict[str, type] = {  # the fields of a greeting and their types
    "family": str,
    "model": str,
    "parameters": int,
    "travelling": int,
    "texts": int,
    "public_texts": int,
    "rounds": list,
}


class Admission:
    """Call it with a site's greeting: returns the reason to refuse the site, or None."""

    def __init__(self, config: RunConfig, central: CentralModel) -> None:
        self.names = {site.name for site in config.sites}
        self.labels, self.public = central.labels_agreed, (central.fingerprint, len(central.public))

    def __call__(self, facts: Facts) -> str | None:
        name, (fingerprint, count) = facts.get("name"), self.public
        wrong = [key for key, kind in GREETING.items() if not isinstance(facts.get(key, kind()), kind)]
        if wrong or not isinstance(name, str) or facts.get("texts", 0) < 0:
            return f"what the site says of itself cannot be read: {', '.join(wrong) or 'name or texts'}"
        if not all(type(number) is int for number in facts.get("rounds", [])):
            return "what the site says of itself cannot be read: rounds"
        if self.names and name not in self.names:
            return f"site {name!r} is not in this run; its sites are: {', '.join(sorted(self.names))}"
        if facts.get("labels") != self.labels:
            return (
                f"site {name}: labels {facts.get('labels')} in this order, the run has {self.labels}; order them alike"
            )
        if facts.get("public") != fingerprint:
            return (
                f"site {name}: another public set (sha256 {str(facts.get('public'))[:16]}..., "
                f"{facts.get('public_texts')} texts) than the coordinator's ({fingerprint[:16]}..., "
                f"{count} texts); load the same texts in the same order on both sides"
            )
        return None
