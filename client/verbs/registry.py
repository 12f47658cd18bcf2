"""Verbs by name: a verb is a function of the Node and the Ask."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from fedstill.common.models.learner import Practice
from fedstill.common.wire import Arrays, Ask, Facts

if TYPE_CHECKING:
    from fedstill.client.node import Node

Answer = tuple[Arrays, Facts]
Verb = Callable[["Node", Ask], Answer]
VERBS: dict[str, Verb] = {}


def verb(name: str) -> Callable[[Verb], Verb]:
    """Register a function as the answer to an Ask; the name is also the Flower message type."""

    def register(function: Verb) -> Verb:
        if name in VERBS:
            raise ValueError(f"two verbs are called {name!r}")
        VERBS[name] = function
        return function

    return register


def practice_of(ask: Ask) -> Practice:
    """How the Ask wants a call to train."""
    decay = ask.settings.get("decay")
    return Practice(
        ask.settings.get("optimizer", "adamw"), bool(ask.settings.get("fresh")), tuple(decay) if decay else None
    )
