"""How a model trains where nobody says: rates and warm-up by its size, and by whether it is pretrained.

A run's train.learning_rate or a learner's own learning_rate replaces all of it; tables of papers set the papers' rates.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedstill.common.models.frozen import FrozenEncoder
from fedstill.common.models.text_model import TextModel

UNTRAINED = 1e-3  # layers drawn from a seed, and a head on a frozen encoder
BY_SIZE = ((10_000_000, 3e-4), (60_000_000, 1e-4))  # pretrained models below so many parameters
BASE = 2e-5  # larger ones, as in the papers
ADAPTERS = 10.0  # factor for LoRA, at most UNTRAINED
TOWARDS_OTHERS = 0.1  # of a site's own rate: AdamW's steps have a fixed size and must not drown out the labels
WARMUP = 0.06  # share of a falling schedule, for pretrained layers: their first steps would undo what they know


@dataclass(frozen=True)
class Defaults:
    """Rates of a model's own training and of its steps towards other models' predictions, and its warm-up."""

    local: float
    distil: float
    warmup: float


def defaults_of(model: TextModel, central: bool) -> Defaults:
    """Return a model's defaults; the central model learns only from others, so that both of its rates are the same."""
    count = sum(value.numel() for value in model.parameters())
    local, warmup = UNTRAINED, 0.0
    if model.pretrained and not isinstance(model, FrozenEncoder):
        local, warmup = next((rate for most, rate in BY_SIZE if count < most), BASE), WARMUP
    if model.adapted:
        local *= ADAPTERS
    local = min(local, UNTRAINED)
    return Defaults(local, local if central else TOWARDS_OTHERS * local, warmup)
