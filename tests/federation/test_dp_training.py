"""DP-SGD at a site: gradients by hand, noise and samples nobody can repeat, a budget, and free answers afterwards."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedstill.client.node import Node
from fedstill.client.release.dp_training import _sampled, fit_privately
from fedstill.client.release.privacy import Plan
from fedstill.common.config import ConfigError, PrivacyConfig, RunConfig
from fedstill.common.config.files import check
from fedstill.common.practice import Practice
from fedstill.common.wire import Ask

from .conftest import Federation

Make = Callable[..., Federation]
Small = Callable[..., RunConfig]
QUICK = ("report.alone=false", "report.centralized=false", "exchange.quorum=0.5", "data.public=16", "rounds=1")
DP = 'sites.north.privacy={epsilon = 50.0, train = "dp-sgd", noise_multiplier = 1.0, clip = 0.5}'
LORA = "sites.north.lora={r = 2}"
FAMILIES = {
    "bert": (), "roberta": ("sites.north.model=tiny-roberta",), "xlnet": ("sites.north.model=tiny-xlnet",),
    "t5": ("sites.north.model=tiny-t5",), "lora": (LORA,),
}  # fmt: skip


def without_dropout(node: Node) -> None:
    for module in node.learner.model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name in ("dropout", "attention_dropout", "hidden_dropout_prob"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


def gradient(node: Node, row: int) -> list[torch.Tensor]:
    """What one text alone would change, by torch."""
    node.learner.model.train()
    rows = np.array([row])
    loss = node.private_loss(node.learner.model(node.private.batch(rows)), rows)
    found = torch.autograd.grad(loss, node.learner.parameters, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(node.learner.parameters, found, strict=True)]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_is_the_mean_of_clipped_gradients_of_single_texts(family: str, small: Small, tmp_path: Path) -> None:
    config = small("data.private=24", *FAMILIES[family])
    node = Node(config, config.sites[0], "run", tmp_path)
    without_dropout(node)
    count, clip = len(node.private), 0.05
    wanted = [torch.zeros_like(p) for p in node.learner.parameters]
    clipped = 0
    for row in range(count):
        each = gradient(node, row)
        norm = float(torch.sqrt(sum((g**2).sum() for g in each)))  # type: ignore[arg-type]
        clipped += norm > clip
        wanted = [w + g * min(1.0, clip / norm) / count for w, g in zip(wanted, each, strict=True)]
    assert clipped > 0
    before = [p.detach().clone() for p in node.learner.parameters]
    sgd = Practice(optimizer="sgd")
    fit_privately(node.learner, node.private, node.private_loss, Plan(1, 1.0), sgd, clip, 1e-12)
    rate = node.learner.rates["local"]
    for old, new, step in zip(before, node.learner.parameters, wanted, strict=True):
        assert torch.allclose(old - rate * step, new.detach(), atol=1e-7)
    assert sum(float(step.abs().sum()) for step in wanted) > 0


def test_the_noise_has_its_deviation_and_follows_from_no_seed(small: Small, tmp_path: Path) -> None:
    config = small("data.private=24", "train.learning_rate=1.0")
    nodes = [Node(config, config.sites[0], "run", tmp_path / name) for name in "ab"]
    sgd, moved = Practice(optimizer="sgd"), []
    for node in nodes:
        before = [p.detach().clone() for p in node.learner.parameters]
        with node.learner.at(1, 1):  # the same place, and so the same seed
            fit_privately(node.learner, node.private, node.private_loss, Plan(1, 0.5), sgd, 0.01, 100.0)
        moved.append(torch.cat([(n - o).flatten() for n, o in zip(node.learner.parameters, before, strict=True)]))
    expected = 100.0 * 0.01 / max(1, round(0.5 * len(nodes[0].private)))
    assert float(moved[0].std()) == pytest.approx(expected, rel=0.02)
    assert abs(float(torch.corrcoef(torch.stack(moved))[0, 1])) < 0.02


def test_samples_are_poisson_and_nobody_can_repeat_them() -> None:
    torch.manual_seed(1)
    np.random.seed(1)
    first = [_sampled(1000, 0.1) for _ in range(50)]
    torch.manual_seed(1)
    np.random.seed(1)
    assert not np.array_equal(first[0], _sampled(1000, 0.1))
    sizes = [len(sample) for sample in first]
    assert np.mean(sizes) == pytest.approx(100, abs=8)
    assert 4 < np.std(sizes) < 16  # a fixed batch would not vary, and would cost more than is counted
    assert len(_sampled(1000, 1.0)) == 1000


def test_a_planted_nan_shows_in_no_step(small: Small, tmp_path: Path) -> None:
    config = small("data.private=24", DP)
    node = Node(config, config.sites[0], "run", tmp_path)
    weights = {name: value.copy() for name, value in node.learner.weights().items()}
    table = next(name for name in weights if "word_embeddings" in name)
    word = int(node.private.batch(np.arange(1))["input_ids"][0, 1])
    weights[table][word] = np.nan
    reply = node.answer(Ask("train.parameters", weights, {"epochs": 1}))
    others = {name: value for name, value in reply.arrays.items() if name != table}
    assert all(np.isfinite(value).all() for value in others.values())  # in both cases: with and without the word
    assert set(reply.metrics) == {"texts", "privacy"}


def test_training_is_paid_for_and_everything_after_it_is_free(small: Small, tmp_path: Path) -> None:
    config = small(DP)
    node = Node(config, config.sites[0], "run", tmp_path)
    told = node.answer(Ask("train.local", settings={"epochs": 1})).metrics["privacy"]
    steps = -(-len(node.private) // 16)
    assert (told["steps"], told["noise_multiplier"], told["clip"]) == (steps, 1.0, 0.5)
    ask = Ask("query.predictions", {"rows": np.arange(8)})
    one, two = node.answer(ask), node.answer(ask)
    assert np.array_equal(one.arrays["logits"], two.arrays["logits"])
    assert np.array_equal(one.arrays["logits"], node.learner.predict(node.public, np.arange(8)))
    assert "privacy" not in one.metrics
    assert node.answer(Ask("evaluate.test")).metrics["accuracy"] >= 0
    again = node.answer(Ask("train.local", settings={"epochs": 1})).metrics["privacy"]
    assert again["steps"] == 2 * steps
    assert again["epsilon"] > told["epsilon"]


@pytest.mark.parametrize("verb", ["query.counts", "train.described", "query.trained", "evaluate.alone", "train.ditto"])
def test_what_looks_at_the_texts_themselves_is_refused_after_dp_sgd_too(
    verb: str, small: Small, tmp_path: Path
) -> None:
    config = small(DP)
    node = Node(config, config.sites[0], "run", tmp_path)
    with pytest.raises(ValueError, match="not declared safe"):
        node.answer(Ask(verb, settings={"epochs": 1}))


def test_private_texts_are_not_mixed_into_plain_training(small: Small, tmp_path: Path) -> None:
    config = small(DP)
    node = Node(config, config.sites[0], "run", tmp_path)
    lesson: dict[str, Any] = {"loss": "soft", "epochs": 1, "private": True}
    with pytest.raises(ValueError, match="trains by DP-SGD, on its private texts alone"):
        node.answer(Ask("train.distil", {"rows": np.arange(4), "targets": np.full((4, 2), 0.5, np.float32)}, lesson))


def test_a_spent_budget_ends_training_before_it_begins(small: Small, tmp_path: Path) -> None:
    config = small('sites.north.privacy={epsilon = 2.0, train = "dp-sgd", epochs = 2}')
    node = Node(config, config.sites[0], "run", tmp_path)
    for _ in range(2):
        told = node.answer(Ask("train.local", settings={"epochs": 1})).metrics["privacy"]
    assert told["epsilon"] == pytest.approx(2.0, abs=0.05)
    before = node.learner.weights()
    with pytest.raises(RuntimeError, match=r"budget is spent: \d+ more steps of training"):
        node.answer(Ask("train.local", settings={"epochs": 1}))
    assert all(np.array_equal(value, before[name]) for name, value in node.learner.weights().items())


def test_a_checkpoint_of_plain_training_is_not_taken_up(small: Small, tmp_path: Path) -> None:
    config = small()
    Node(config, config.sites[0], "run", tmp_path).answer(Ask("query.save", settings={"number": 1}))
    guarded = small(DP)
    node = Node(guarded, guarded.sites[0], "run", tmp_path)
    with pytest.raises(ValueError, match="trained without noise"):
        node.answer(Ask("query.restore", settings={"number": 1}))
    node.answer(Ask("query.save", settings={"number": 2}))
    node.answer(Ask("query.restore", settings={"number": 2}))


@pytest.mark.parametrize("method", ["fedavg", "ds-fl", "fedid"])
def test_whole_runs_with_a_site_that_trains_by_dp_sgd(federation: Make, small: Small, method: str) -> None:
    made = federation(small(*QUICK, DP, f"method.name={method}", "sites.south.model=tiny-bert"))
    summary = made.run()
    assert not made.events("left_out")
    assert summary["sites"]["north"]["privacy"]["steps"] == -(-summary["sites"]["north"]["texts"] // 16)
    assert summary["sites"]["north"]["after"]["accuracy"] >= 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"train": "dp-sgd"},
        {"train": "dp-sgd", "predictions": 5},
        {"epochs": 3},
        {"train": "dp-sgd", "epochs": 1, "noise_multiplier": 1},
    ],
)
def test_the_noise_is_named_once(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="noise_multiplier"):
        check(PrivacyConfig, {"epsilon": 1.0, **wrong}, "site.toml")
