"""FedKD of Wu et al. at a site: the private model teaches a shared one that lives beside it, and learns from it."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from fedstill.client.verbs.registry import Answer, practice_of, verb
from fedstill.common.maths.mutual import comparable, mutual_losses
from fedstill.common.maths.svd import compress, misfits, recompose
from fedstill.common.models.learner import Learner, together
from fedstill.common.models.loading import load_model
from fedstill.common.models.tokens import Encoded
from fedstill.common.randomness import derive
from fedstill.common.wire import Ask, WireError

if TYPE_CHECKING:
    from fedstill.client.node import Node

KEPT = "shared/"


@dataclass
class Shared:
    """The shared model at this site, and the private texts in its own tokens; its state lives in `node.kept`."""

    learner: Learner
    private: Encoded
    same_tokens: bool


@verb("train.mutual")
def mutual(node: Node, ask: Ask) -> Answer:
    """E epochs on the private texts with both models; the shared model's change goes up, the private one stays."""
    shared = _shared(node)
    if ask.arrays:
        shared.learner.load_weights(ask.arrays)
    before = shared.learner.weights()
    losses = _train_both(node, shared, ask)
    after = shared.learner.weights()
    shared.learner.load_weights(before)  # everybody's mean change comes later
    _keep(node, shared)
    change = {name: after[name] - before[name] for name in before}
    share = ask.settings.get("share")
    return (compress(change, float(share)) if share else change), {"texts": len(node.private), **losses}


@verb("train.change")
def take_over_change(node: Node, ask: Ask) -> Answer:
    """The mean change of everybody's shared model, to be added to the one that the change began from."""
    shared = _shared(node)
    before = shared.learner.weights()
    wrong = misfits(ask.arrays, before)
    if wrong:
        raise WireError(f"this change does not fit the shared model: {'; '.join(wrong[:8])}")
    change = recompose(ask.arrays, before)
    shared.learner.load_weights({name: value + change[name] for name, value in before.items()})
    _keep(node, shared)
    return {}, {}


def _shared(node: Node) -> Shared:
    """The shared model as the last verb left it, also after a checkpoint was taken up."""
    if node.second is None:
        config, here = node.config, {name: getattr(node.site, name) for name in ("device", "precision")}
        central = config.central.model_copy(update=here)
        model = load_model(central.model_settings(config.train), node.task, derive(config.seed, "central", "model"))
        learner = Learner(f"{node.name}/shared", model, central, config.train, config.seed)
        private = model.encode(node.texts.private.texts)
        same = private.columns.keys() == node.private.columns.keys() and all(
            np.array_equal(column, node.private.columns[name]) for name, column in private.columns.items()
        )
        node.second = Shared(learner, private, same)
    kept = {name.removeprefix(KEPT): value for name, value in node.kept.items() if name.startswith(KEPT)}
    if kept:
        node.second.learner.load_state(kept)
    return node.second


def _keep(node: Node, shared: Shared) -> None:
    others = {name: value for name, value in node.kept.items() if not name.startswith(KEPT)}
    node.kept = {**others, **{KEPT + name: value for name, value in shared.learner.state().items()}}


def _train_both(node: Node, shared: Shared, ask: Ask) -> dict[str, float | bool]:
    epochs, size = int(ask.settings["epochs"]), node.learner.batch_size
    texts, both = len(node.private), [node.learner, shared.learner]
    starts, hidden, sums = range(0, texts, size), False, np.zeros(2)
    step = together(both, "local", practice_of(ask), epochs * len(starts))
    with ExitStack() as frozen:
        for learner in both:
            learner.model.train()
            if ask.settings.get("frozen"):
                frozen.enter_context(learner.model.frozen_embeddings())
        for _ in range(epochs):
            order, sums = torch.randperm(texts).numpy(), np.zeros(2)
            for start in starts:
                rows = order[start : start + size]
                own, other = node.private.batch(rows), shared.private.batch(rows)
                said = [both[0].model.with_states(own), both[1].model.with_states(other)]
                hidden = shared.same_tokens and comparable(said[0][1], said[1][1])
                mask = own["attention_mask"].to(node.labels.device) if hidden else None
                losses = mutual_losses(said[0], said[1], node.labels[rows], mask, bool(ask.settings.get("joint")))
                step(losses[0] + losses[1])  # what is taken as given has no gradient, so each gets its own
                sums += [float(loss.detach()) * len(rows) for loss in losses]
    means = sums / max(1, texts)
    return {"loss": float(means[1]), "teacher_loss": float(means[0]), "hidden": hidden}
