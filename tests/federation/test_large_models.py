"""Settings for large models, on the CPU: the same training in less memory, up to rounding."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch._inductor.cpp_builder import cpp_compiler_search

from fedstill.common.config import LearnerConfig, RunConfig, SiteConfig, TrainConfig
from fedstill.common.data.tasks import TASKS
from fedstill.common.maths.losses import cross_entropy
from fedstill.common.models.learner import Learner
from fedstill.common.models.loading import load_model
from fedstill.common.models.text_model import ModelError
from fedstill.common.practice import Practice
from tests.decoders import make_decoders

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


def test_a_compiled_model_learns_the_same_and_keeps_its_names(tmp_path: Path) -> None:
    """A step, a checkpoint and an exchange of weights between a compiled and a plain model, with inductor."""
    folder = make_decoders(tmp_path)["gpt2"]
    learners = []
    for compiled in (False, True):
        settings = LearnerConfig(model=folder, compile=compiled, answer="head", device="cpu", attention="eager")
        train = TrainConfig(learning_rate=1e-3, max_length=16)
        model = load_model(settings.model_settings(train), TASKS["film-reviews"], 1)
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        learners.append(Learner("one", model, settings, train, 1))
    texts = learners[0].model.encode(["a fine film", "dull and slow"])
    labels, losses = torch.tensor([1, 0]), []
    for learner in learners:
        with learner.at("there"):
            losses.append(learner.fit(texts, np.arange(2), lambda logits, places: cross_entropy(logits, labels[places]),
                                      2, "local", Practice(optimizer="sgd")))  # fmt: skip
    plain, fast = learners
    assert type(fast.model.net) is type(plain.model.net)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0  # it was compiled
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert list(fast.weights()) == list(plain.weights())
    assert list(fast.state()["model"]) == list(plain.state()["model"])
    assert max(float(np.abs(a - fast.weights()[name]).max()) for name, a in plain.weights().items()) < 1e-6
    plain.load_weights(fast.weights())
    fast.load_state(plain.state())
    fast.model.save(tmp_path / "saved")
    assert not [name for name in load_file(tmp_path / "saved/model.safetensors") if "_orig_mod" in name]


def test_what_cannot_be_compiled_is_refused_before_the_run(
    federation: Make, small: Small, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="compile takes whole models"):
        small("central.freeze=1", "central.compile=true")
    private = {"epsilon": 1.0, "train": "dp-sgd", "epochs": 1}
    with pytest.raises(ValueError, match="DP-SGD takes each text's own gradient"):
        SiteConfig.model_validate({"name": "north", "compile": True, "privacy": private})
    with pytest.raises(ValueError, match="take compile out"):
        federation(small(*QUICK, "method.name=fedid", "method.feedback=exact", "central.compile=true"))
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    cpp_compiler_search.cache_clear()
    with pytest.raises(ModelError, match=r"needs a C\+\+ compiler"):
        federation(small(*QUICK, "central.compile=true"))
    cpp_compiler_search.cache_clear()
