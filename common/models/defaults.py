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
T5 = 2.0  # factor for its families: at first they say how frequent the label words are, and must forget that
ADAPTERS = 10.0  # factor for LoRA, at most UNTRAINED
TOWARDS_OTHERS = 0.1  # of a site's own rate: AdamW's steps have a fixed size and must not drown out the labels
CHASING = 0.03  # the same where the target is computed anew after every step, so that sites chase each other
CHASING_T5 = 0.003  # for T5, whose scores of words move further with a step: see MODELS.md
FROM_OTHERS = 2.0  # of that rate, for a central model: it never sees private texts and takes few steps on public ones
WARMUP = 0.06  # share of a falling schedule, for pretrained layers: their first steps would undo what they know
FALL = 0.5  # its last part, in which the rate falls, for pretrained layers: otherwise they learn half as much


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
    t5 = "t5" in model.family
    local, learned, course, whole = UNTRAINED, UNTRAINED, (0.0, 1.0), not isinstance(model, FrozenEncoder)
    if model.pretrained and whole:
        local, course = next((rate for most, rate in BY_SIZE if count < most), BASE), (WARMUP, FALL)
        if local > BASE:  # large models keep the papers' rate
            local *= T5 if t5 else 1.0
            learned = FROM_OTHERS * local
        else:
            learned = local
    factor = ADAPTERS if model.adapted else 1.0
    local, learned = min(factor * local, UNTRAINED), min(factor * learned, UNTRAINED)
    if central:
        return Defaults(local, learned, learned, *course)
    interact = (CHASING_T5 if t5 else CHASING) if whole else TOWARDS_OTHERS
    return Defaults(local, TOWARDS_OTHERS * local, interact * local, *course)
