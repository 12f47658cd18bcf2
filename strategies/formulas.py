"""A method's bytes on the wire by its paper's arithmetic, beside the bytes counted.

Bytes of one site and one round, by phase: (up, down). Numbers have four bytes, predictions as many as their encoding;
ids, heads and gRPC's own framing are not in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

Phases = dict[str, tuple[int, int]]
WIDTHS = {"float32": 4, "float16": 2, "int8": 1}  # bytes of a number in a prediction


@dataclass(frozen=True)
class Sizes:
    """What the formulas are about."""

    public: int  # N0, or the part of it that a round uses
    classes: int  # C
    passes: int = 1  # E_d, where every pass is exchanged
    batches: int = 1  # exchanges in one pass
    state: int = 0  # bytes of the weights that travel, 4P
    width: int = 4  # bytes of a number in a prediction
    exact: bool = False

    @property
    def prediction(self) -> int:
        """One prediction of every public text."""
        return self.width * self.public * self.classes


def both_ways(s: Sizes) -> Phases:
    """Predictions up, targets down."""
    return {"prediction": (s.prediction, 0), "distillation": (0, s.prediction)}


def batch_by_batch(s: Sizes) -> Phases:
    """FedID: indices, ensemble and h (or the matrix G) down for every batch, predictions up."""
    feedback = 4 * s.public * s.classes if s.exact else 4 * s.batches
    down = 4 * s.public + s.prediction + feedback
    return {"interactive": (s.passes * s.prediction, s.passes * down)}


def weights_both_ways(s: Sizes) -> Phases:
    """FedAvg and its kin: 4P up, and 4P back; sites that never had the central model get it once more."""
    return {"local training": (s.state, 0), "weights back": (0, s.state)}


def once(extra: str) -> Callable[[Sizes], Phases]:
    """Predictions up and C more numbers, nothing back."""
    return lambda s: {"prediction": (s.prediction, 0), extra: (4 * s.classes, 0)}


def weights_down(s: Sizes) -> Phases:
    """FedED: the central model down, predictions up."""
    return {"local training": (0, s.state), "prediction": (s.prediction, 0)}


class Formula(Protocol):
    """Bytes of one site and one round, by phase."""

    def __call__(self, s: Sizes, /) -> Phases: ...


def sizes_of(
    settings: Mapping[str, Any], *, public: int, classes: int, batch: int, parameters: int, predictions: str = "float32"
) -> Sizes:
    """What the formulas need to know of a method with these settings."""
    used = min(public, settings.get("subset") or public)
    return Sizes(
        used,
        classes,
        passes=settings.get("distill_epochs", 1),
        batches=-(-used // (settings.get("batch_size") or batch)),
        state=4 * parameters,
        width=WIDTHS[predictions],
        exact=settings.get("feedback") == "exact",
    )
