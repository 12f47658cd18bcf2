"""Settings for large models, on the CPU: the same training in less memory, up to rounding."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from fedstill.common.config import RunConfig
from fedstill.common.models.text_model import ModelError

from .conftest import Federation, precise

Make = Callable[..., Federation]
Small = Callable[..., RunConfig]
QUICK = ("method.name=ds-fl", "rounds=1", "data.private=32", "data.public=16", "data.test=8",
         "report.centralized=false", "report.alone=false", "sites.south.model=tiny-bert")  # fmt: skip


def everywhere(setting: str) -> tuple[str, ...]:
    return tuple(f"{place}.{setting}" for place in ("central", "sites.north", "sites.south"))


def difference(one: Federation, two: Federation) -> float:
    pairs = zip(one.central.learner.weights().values(), two.central.learner.weights().values(), strict=True)
    return max(float(np.abs(a - b).max()) for a, b in pairs)


def ended(federation: Make, config: RunConfig) -> Federation:
    """A finished run, without dropout: parts of a batch would draw other masks than the batch."""
    made = federation(config)
    for learner in (made.central.learner, *(node.learner for node in made.nodes)):
        for module in learner.model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
    made.run()
    return made


def test_a_batch_in_parts_and_activations_computed_again_make_the_same_step(federation: Make, small: Small) -> None:
    plain = ended(federation, precise(small(*QUICK, *everywhere("attention=eager"))))
    for setting in ("accumulate=4", "recompute=true"):
        other = ended(federation, precise(small(*QUICK, *everywhere("attention=eager"), *everywhere(setting))))
        assert difference(plain, other) < 1e-8, setting
    moved = ended(federation, precise(small(*QUICK, *everywhere("attention=eager"), "central.accumulate=3", "seed=7")))
    assert difference(plain, moved) > 1e-4


def test_fused_attention_and_bfloat16_are_near_the_plain_run(federation: Make, small: Small) -> None:
    plain = federation(small(*QUICK, *everywhere("attention=eager")))
    assert plain.central.learner.model.net.config._attn_implementation == "eager"
    plain.run()
    fused = federation(small(*QUICK, *everywhere("attention=sdpa")))
    assert fused.central.learner.model.net.config._attn_implementation == "sdpa"
    fused.run()
    half = federation(small(*QUICK, *everywhere("precision=bfloat16")))
    half.run()
    scores = [made.central.predict(np.arange(16)) for made in (plain, fused, half)]
    assert np.abs(scores[0] - scores[1]).max() < 0.02
    assert 1e-4 < np.abs(scores[0] - scores[2]).max() < 0.5  # half precision is felt, and does no harm


def test_settings_that_would_do_nothing_are_refused(federation: Make, small: Small) -> None:
    with pytest.raises(ValueError, match="take recompute out"):
        small("central.freeze=encoder", "central.recompute=true")
    with pytest.raises(ModelError, match="cannot recompute activations"):
        federation(small("central.model=tiny-xlnet", "central.recompute=true"))
