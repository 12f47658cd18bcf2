"""How a call trains: which optimizer it uses, and how the rate falls while it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

Optimizer = Literal["adamw", "adafactor", "adafactor_unscaled", "sgd"]


@dataclass(frozen=True)
class Practice:
    """`decay` (a, b) takes the rate linearly from (1 - a) to (1 - b) of its full value over the call; None keeps it."""

    optimizer: Optimizer = "adamw"
    fresh: bool = False  # a new optimizer instead of the one that persists between calls
    decay: tuple[float, float] | None = None
    dropout: bool = True

    KEYS: ClassVar = ("optimizer", "fresh", "decay", "dropout")

    def to_facts(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults, as they travel."""
        defaults = Practice()
        return {key: getattr(self, key) for key in self.KEYS if getattr(self, key) != getattr(defaults, key)}

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any]) -> Practice:
        """Build a practice from its facts among others."""
        decay = facts.get("decay")
        if decay is not None and not (isinstance(decay, list | tuple) and len(decay) == 2):
            raise ValueError(f"decay is two numbers, not {str(decay)[:40]!r}")
        pair = None if decay is None else (float(decay[0]), float(decay[1]))
        return cls(
            facts.get("optimizer", "adamw"), bool(facts.get("fresh")), pair, bool(facts.get("dropout", True))
        )  # fmt: skip
