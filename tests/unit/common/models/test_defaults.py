"""What a model brings along where nobody sets a rate."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fedstill.common.config import LearnerConfig, TrainConfig
from fedstill.common.config.model import ModelConfig
from fedstill.common.data.tasks import TASKS
from fedstill.common.models.defaults import defaults_of
from fedstill.common.models.learner import CENTRAL, Learner
from fedstill.common.models.loading import load_model
from fedstill.common.practice import Practice


def learner(name: str, train: dict[str, Any], who: str = "north", **model: Any) -> Learner:
    settings = ModelConfig(name=name, max_length=16, **model)
    return Learner(who, load_model(settings, TASKS["film-reviews"], 1), LearnerConfig(), TrainConfig(**train), seed=1)


@pytest.mark.parametrize(
    ("model", "local", "central", "warmup"),
    [
        ("tiny-bert", 1e-3, 1e-3, 0.0),
        ("small-bert", 3e-4, 6e-4, 0.06),
        ("small-t5", 6e-4, 1e-3, 0.06),
        ("minilm", 1e-4, 2e-4, 0.06),
    ],
)
def test_rates_follow_size_and_training(model: str, local: float, central: float, warmup: float) -> None:
    site = learner(model, {})
    assert site.rates["local"] == pytest.approx(local)
    assert site.rates["distil"] == pytest.approx(local / 10)
    chasing = 0.003 if "t5" in model else 0.03
    assert site.rates["interact"] == pytest.approx(chasing * local)  # the target moves with every step
    assert site.warmup == warmup
    learned = learner(model, {}, CENTRAL).rates
    assert learned["distil"] == learned["interact"] == pytest.approx(central)  # few steps, on public texts only
    assert learned["local"] == pytest.approx(local)  # as a site with all texts would train


@pytest.mark.parametrize(
    ("family", "parameters", "adapted", "site", "central"),
    [
        ("bert", 59_000_000, False, 1e-4, 2e-4),
        ("t5", 59_000_000, False, 2e-4, 4e-4),
        ("bert", 60_000_000, False, 2e-5, 2e-5),  # the papers' rate, for both
        ("t5", 220_000_000, False, 2e-5, 2e-5),
        ("bert", 110_000_000, True, 2e-4, 2e-4),  # LoRA: ten times that
        ("bert", 9_000_000, True, 1e-3, 1e-3),  # and at most 1e-3
    ],
)
def test_rates_of_models_too_large_to_load_here(
    family: str, parameters: int, adapted: bool, site: float, central: float
) -> None:
    net = torch.nn.Linear(parameters, 1, bias=False, device="meta")  # the count alone matters, and takes no memory
    net.family, net.pretrained, net.adapted = family, True, adapted
    alone, taught = (defaults_of(net, central=who) for who in (False, True))  # type: ignore[arg-type]
    assert (alone.local, taught.local) == (pytest.approx(site), pytest.approx(site))
    assert taught.distil == taught.interact == pytest.approx(central)


def test_a_head_on_a_frozen_encoder_needs_no_warm_up() -> None:
    site = learner("small-bert", {}, freeze="encoder", cache_mb=0)
    assert (site.rates["local"], site.warmup) == (1e-3, 0.0)
    assert site.rates["interact"] == site.rates["distil"] == pytest.approx(1e-4)


def test_a_distill_rate_is_for_fixed_and_moving_targets() -> None:
    settings = LearnerConfig(distill_rate=0.5)
    model = load_model(ModelConfig(name="tiny-bert", max_length=16), TASKS["film-reviews"], 1)
    site = Learner("north", model, settings, TrainConfig(), seed=1)
    assert (site.rates["local"], site.rates["distil"], site.rates["interact"]) == (1e-3, 0.5, 0.5)


def test_pretrained_layers_keep_their_rate_until_half_of_the_run_is_done() -> None:
    site, run = learner("small-bert", {}), Practice(decay=(0.0, 1.0))
    course = [site.rate("local", run, share) / 3e-4 for share in (0.0, 0.03, 0.06, 0.3, 0.5, 0.75, 1.0)]
    assert course == pytest.approx([0.0, 0.5, 1.0, 1.0, 1.0, 0.5, 0.0])
    later = Practice(decay=(0.5, 1.0))  # the second of two rounds
    assert site.rate("local", later, 0.5) == pytest.approx(1.5e-4)
    head = learner("small-bert", {}, freeze="encoder", cache_mb=0)
    assert head.rate("local", run, 0.5) == pytest.approx(5e-4)  # falls from the beginning
    assert learner("small-bert", {"fall": 1.0}).rate("local", run, 0.53) == pytest.approx(1.5e-4)


def test_a_rate_of_ones_own_comes_without_warm_up_unless_it_is_set() -> None:
    assert learner("small-bert", {"learning_rate": 1e-5}).warmup == 0.0
    assert learner("small-bert", {"learning_rate": 1e-5}).fall == 1.0
    assert learner("small-bert", {"learning_rate": 1e-5, "fall": 0.2}).fall == 0.2
    assert learner("small-bert", {"learning_rate": 1e-5, "warmup": 0.2}).warmup == 0.2
    assert learner("small-bert", {"warmup": 0.0}).warmup == 0.0
