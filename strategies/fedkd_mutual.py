"""FedKD. Wu et al., "Communication-efficient federated learning via knowledge distillation", Nat. Commun. 2022."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field

from fedstill.common.maths.ensemble import by_size, mean_arrays, uniform
from fedstill.common.maths.mutual import comparable, mutual_losses
from fedstill.common.maths.svd import compress, energy_share, misfits, recompose
from fedstill.common.models.learner import Learner, together
from fedstill.common.models.loading import load_model
from fedstill.common.models.tokens import Encoded
from fedstill.common.practice import Practice
from fedstill.common.randomness import derive
from fedstill.common.states import State
from fedstill.common.wire import Arrays, Reply, WireError
from fedstill.common.wire.typed import Message
from fedstill.strategies.base import BALANCED, BalancedMethod, BalancedParams, Round, mean_loss, names, texts_of
from fedstill.strategies.verbs import NOTHING, Nothing, site_verb

if TYPE_CHECKING:
    from fedstill.client.node import Node
    from fedstill.server.federation import Federation

SHARED = "shared"  # under which a site keeps the shared model


class FedKDMutualParams(BalancedParams):
    """tau(t) goes from `energy_start` to `energy_end` over the rounds; `joint`: one loss, nothing taken as given."""

    svd: bool = True
    energy_start: float = Field(0.95, gt=0, le=1)
    energy_end: float = Field(0.98, gt=0, le=1)
    joint: bool = False
    weights: Literal["size", "uniform"] = "uniform"
    freeze_embeddings: bool = False


@dataclass(frozen=True)
class TeachEachOther(Message):
    """E epochs with both models; `share` of the energy is kept of what comes up, all of it where there is none."""

    epochs: int
    share: float | None = None
    joint: bool = False
    frozen: bool = False
    practice: Practice = Practice()
    most: int | None = None  # private texts, drawn for this call
    weights: State = field(default_factory=dict)


@dataclass(frozen=True)
class Change(Message):
    """A change of the shared model, array by array or as thin factors."""

    change: State


@dataclass(frozen=True)
class Taught(Message):
    """The site's change, and what both models lost by."""

    texts: int
    loss: float
    teacher_loss: float
    hidden: bool
    change: State


class FedKDMutual(BalancedMethod):
    """A site's own model and a shared one teach each other; the shared one's changes travel, as thin factors."""

    name = "fedkd-mutual"
    paper = "Wu et al. 2022"
    parameters = FedKDMutualParams
    presets: ClassVar = {
        "paper": {},
        "authors_code": {"joint": True, "freeze_embeddings": True},
        "feddrs": {"svd": False, **BALANCED},
    }
    p: FedKDMutualParams

    def round(self, fed: Federation) -> Round:
        shared = fed.central.weights()
        done = fed.number / fed.config.rounds
        tau = energy_share(done, self.p.energy_start, self.p.energy_end) if self.p.svd else None
        frozen, practice, most = self.p.freeze_embeddings, self.practice(fed), self.most_texts(fed)
        task = TeachEachOther(self.p.local_epochs, tau, self.p.joint, frozen, practice, most)
        each = {site: {"weights": shared} for site in self.copies.lacking(fed.participants)}
        replies = yield teach_each_other.ask(task, each=each, check=_recomposes(shared))
        weights = by_size(texts_of(replies)) if self.p.weights == "size" else uniform(names(replies))
        mean = mean_arrays({r.node: recompose(r.arrays, shared) for r in replies}, weights)
        down = compress(mean, tau) if tau else mean
        change = recompose(down, shared)  # what the sites get, not what was sent up: all hold the same model
        fed.central.load_weights({name: value + change[name] for name, value in shared.items()})
        self.copies.only(names((yield take_change.ask(Change(down), to=names(replies)))))
        hidden = all(bool(r.metrics.get("hidden")) for r in replies)
        return {"loss": mean_loss(replies, weights), "share": tau, "hidden": hidden}


def _recomposes(like: Arrays) -> Callable[[Reply], None]:
    def check(reply: Reply) -> None:
        wrong = misfits(reply.arrays, like)
        if wrong:
            raise WireError(f"{len(wrong)} arrays do not fit the central model: " + "; ".join(wrong[:8]))

    return check


# --- the site's half ---


@dataclass
class Shared:
    """The shared model at this site, and the private texts in its own tokens; its state lives in `site.kept`."""

    learner: Learner
    private: Encoded
    same_tokens: bool


@site_verb("train.mutual", leaves="weights", phase="mutual distillation")
def teach_each_other(site: Node, task: TeachEachOther) -> Taught:
    """E epochs on the private texts with both models; the shared model's change goes up, the private one stays."""
    shared = _shared(site)
    if task.weights:
        shared.learner.load_weights(task.weights)
    before = shared.learner.weights()
    (teacher, student), hidden = _train_both(site, shared, task)
    after = shared.learner.weights()
    shared.learner.load_weights(before)  # everybody's mean change comes later
    site.kept[SHARED] = shared.learner.state()
    change = {name: after[name] - before[name] for name in before}
    return Taught(len(site.private), student, teacher, hidden, compress(change, task.share) if task.share else change)


@site_verb("train.change", leaves=NOTHING, phase="weights back")
def take_change(site: Node, mean: Change) -> Nothing:
    """The mean change of everybody's shared model, to be added to the one that the change began from."""
    shared = _shared(site)
    before = shared.learner.weights()
    wrong = misfits(mean.change, before)
    if wrong:
        raise WireError(f"this change does not fit the shared model: {'; '.join(wrong[:8])}")
    change = recompose(mean.change, before)
    shared.learner.load_weights({name: value + change[name] for name, value in before.items()})
    site.kept[SHARED] = shared.learner.state()
    return Nothing()


def _shared(site: Node) -> Shared:
    """The shared model as the last verb left it, also after a checkpoint was taken up."""
    if site.second is None:
        config, hardware = site.config, {name: getattr(site.site, name) for name in ("device", "precision")}
        central = config.central.model_copy(update=hardware)
        model = load_model(central.model_settings(config.train), site.task, derive(config.seed, "central", "model"))
        learner = Learner(f"{site.name}/shared", model, central, config.train, config.seed)
        private = model.encode(site.texts.private.texts)
        same = private.columns.keys() == site.private.columns.keys() and all(
            np.array_equal(column, site.private.columns[name]) for name, column in private.columns.items()
        )
        site.second = Shared(learner, private, same)
    second: Shared = site.second
    if SHARED in site.kept:
        second.learner.load_state(site.kept[SHARED])
    return second


def _train_both(site: Node, shared: Shared, task: TeachEachOther) -> tuple[tuple[float, float], bool]:
    """Mean losses of the private and the shared model in the last epoch, and whether hidden states were compared."""
    drawn = torch.randperm(len(site.private)).numpy()[: task.most] if task.most else np.arange(len(site.private))
    size, texts, both = site.learner.batch_size, len(drawn), [site.learner, shared.learner]
    starts, hidden, sums = range(0, texts, size), False, np.zeros(2)
    step = together(both, "local", task.practice, task.epochs * len(starts))
    with ExitStack() as frozen:
        for learner in both:
            learner.model.train()
            if task.frozen:
                frozen.enter_context(learner.model.frozen_embeddings())
        for _ in range(task.epochs):
            order, sums = torch.randperm(texts).numpy(), np.zeros(2)
            for start in starts:
                rows = drawn[order[start : start + size]]
                own, other = site.private.batch(rows), shared.private.batch(rows)
                outputs = [both[0].model.with_states(own), both[1].model.with_states(other)]
                hidden = shared.same_tokens and comparable(outputs[0][1], outputs[1][1])
                mask = own["attention_mask"].to(site.labels.device) if hidden else None
                losses = mutual_losses(outputs[0], outputs[1], site.labels[rows], mask, task.joint)
                step(losses[0] + losses[1])  # what is taken as given has no gradient, so each gets its own
                sums += [float(loss.detach()) * len(rows) for loss in losses]
    means = sums / max(1, texts)
    return (float(means[0]), float(means[1])), hidden
