"""Admission to a run: a site's greeting, and what it must have in common with the other sites."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from fedstill.common.config import LONGEST_NAME, NAME, RunConfig
from fedstill.common.readable import plain
from fedstill.common.wire import Facts, WireError
from fedstill.common.wire.typed import Message, check_parts
from fedstill.server.central import CentralModel

MODEL = re.compile(r"[\w.:+@/ -]{1,200}")  # a model's name, and its family: they reach the model card


@dataclass(frozen=True)
class Greeting(Message):
    """What a site says of itself when it joins."""

    name: str
    family: str
    model: str
    parameters: int
    texts: int
    public: str
    public_texts: int
    rounds: list[int]
    travelling: int = 0
    rates: dict[str, float] | None = None
    labels: list[str] | None = None
    privacy: Literal["noise", "dp-sgd"] | None = None


def why_no_name(name: object) -> str | None:
    """Return why this cannot be a site's name, on any link; None if it can."""
    if isinstance(name, str) and len(name) <= LONGEST_NAME and re.fullmatch(NAME, name):
        return None
    return "a site's name has letters, digits, _ . and - only, 64 of them at most"


class Admission:
    """Call it with a site's greeting: returns the reason to refuse the site, or None."""

    def __init__(self, config: RunConfig, central: CentralModel) -> None:
        self.names, self.most_texts = {site.name for site in config.sites}, config.exchange.most_texts
        self.texts_of = config.exchange.texts
        self.labels, self.public = central.labels_agreed, (central.fingerprint, len(central.public))

    def __call__(self, facts: Facts) -> str | None:
        name, (fingerprint, count) = facts.get("name"), self.public
        try:
            check_parts(Greeting, {}, facts)
        except WireError as error:
            return f"what the site says of itself cannot be read: {plain(error, 200)}"
        strange = [key for key in ("family", "model") if not MODEL.fullmatch(facts[key])]
        strange += [key for key in ("texts", "parameters", "travelling") if facts.get(key, 0) < 0]
        if strange:
            return f"what the site says of itself cannot be read: {strange[0]}"
        if facts["texts"] > self.most_texts:
            return f"site {name}: it claims {facts['texts']:,} texts, and exchange.most_texts is {self.most_texts:,}"
        if facts["texts"] > (most := self.texts_of.get(str(name), self.most_texts)):
            return f"site {name}: it claims {facts['texts']:,} texts, and exchange.texts.{name} is {most:,}"
        if self.names and name not in self.names:
            return f"site {name!r} is not in this run; its sites are: {', '.join(sorted(self.names))}"
        if facts.get("labels") != self.labels:
            labels = plain(facts.get("labels"), 400)
            return f"site {name}: labels {labels} in this order, the run has {self.labels}; order them alike"
        if facts.get("public") != fingerprint:
            return (
                f"site {name}: another public set (sha256 {plain(facts['public'], 16)}..., "
                f"{facts.get('public_texts')} texts) than the coordinator's ({fingerprint[:16]}..., "
                f"{count} texts); load the same texts in the same order on both sides"
            )
        return None
