"""How a model trains where nobody says: rates and their course by its size, and by whether it is pretrained.

A run's train.learning_rate or a learner's own learning_rate replaces all of it; tables of papers set the papers' rates.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedstill.common.models.frozen import FrozenEncoder
from fedstill.common.models.text_model import TextModel

UNTRAINED = 1e-3  # layers drawn from a seed, and a head on a frozen encoder
BY_SIZE = ((10_000_000, 3e-4), (60_000_000, 1e-4))  # pretrained models below so many parameters
BASE = 2e-5  # larger ones, as in the papers
T5 = 2.0  # factor of small ones: at first they say how frequent the label words are, and must forget that
FROM_OTHERS = 2.0  # factor of small central models: they see no private texts and take few steps, on public ones
ADAPTERS = 10.0  # factor for LoRA, at most UNTRAINED
TOWARDS_OTHERS = 0.1  # of a site's own rate: AdamW's steps have a fixed size and must not drown out the labels
CHASING = 0.03  # the same where the target is computed anew after every step, so that sites chase each other
CHASING_T5 = 0.003  # for T5, which such steps drew to chance: see MODELS.md
WARMUP = 0.06  # share of a falling schedule, for pretrained layers: their first steps would undo what they know
FALL = 0.5  # last share of it, in which the rate falls, for pretrained layers: otherwise they learn half as much


@dataclass(frozen=True)
class Defaults:
    """Rates of a model's own training and of its steps towards others' predictions (fixed, moving); their course."""

    local: float
    distil: float
    interact: float
    warmup: float
    fall: float


def defaults_of(model: TextModel, central: bool) -> Defaults:
    """Return a model's defaults; a central model learns from others only, a site above all from its own labels."""
    count = sum(value.numel() for value in model.parameters())
    t5, whole = "t5" in model.family, not isinstance(model, FrozenEncoder)
    local, from_others, course = UNTRAINED, 1.0, (0.0, 1.0)
    if model.pretrained and whole:
        local, course = next((rate for most, rate in BY_SIZE if count < most), BASE), (WARMUP, FALL)
        if local > BASE:  # larger models keep the papers' rate
            local, from_others = local * (T5 if t5 else 1.0), FROM_OTHERS
    if model.adapted:
        local *= ADAPTERS
    local, learned = min(local, UNTRAINED), min(from_others * local, UNTRAINED)
    if central:
        return Defaults(local, learned, learned, *course)
    chasing = (CHASING_T5 if t5 else CHASING) if whole else TOWARDS_OTHERS
    return Defaults(local, TOWARDS_OTHERS * local, chasing * local, *course)
