"""Verbs that every run uses: train on the private texts, be tested, keep a checkpoint and take it up again."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fedstill.common import checkpoint
from fedstill.common.practice import Practice
from fedstill.common.states import State
from fedstill.common.wire import Facts, WireError
from fedstill.common.wire.typed import Message
from fedstill.strategies.verbs import NOTHING, Nothing, Shield, site_verb

if TYPE_CHECKING:
    from fedstill.client.node import Node


@dataclass(frozen=True)
class Train(Message):
    """E epochs on the private texts, from the given weights if there are any."""

    epochs: int
    practice: Practice = Practice()
    weights: State = field(default_factory=dict)


@dataclass(frozen=True)
class Trained(Message):
    """How many texts a site trained on, and its mean loss: of the last epoch, and of each."""

    texts: int
    loss: float | None = None  # a site with noise tells no loss
    losses: list[float] | None = None


@dataclass(frozen=True)
class Scores(Message):
    """The task's scores, by their names."""

    scores: Facts


@dataclass(frozen=True)
class Keep(Message):
    """A checkpoint, by the number of its round."""

    number: int


@dataclass(frozen=True)
class Kept(Message):
    """The hash that stands for the site's ledger up to here; it tells nothing of what the ledger says."""

    ledger: str


@site_verb("train.local", leaves=NOTHING, phase="local training", shield=Shield(("texts",)))
def train_locally(site: Node, task: Train) -> Trained:
    """E epochs of CE on the private texts (FedID eqs. 1, 2, 4)."""
    if task.weights:
        site.learner.load_weights(task.weights)
    losses = site.train_privately(task.epochs, task.practice)
    return Trained(site.size, losses[-1], losses)


@site_verb("evaluate.test", leaves=NOTHING, phase="evaluation", shield=Shield(learned=("scores",)))
def evaluate(site: Node, nothing: Nothing) -> Scores:
    """The task's scores on the test texts."""
    if site.guard is not None and site.site.data is not None:
        raise WireError(
            "the test texts are a part of this site's own file, and [privacy] does not let scores of it out"
        )
    return Scores(site.test_scores())


@site_verb("evaluate.alone", leaves=NOTHING, phase="alone")
def evaluate_alone(site: Node, task: Train) -> Scores:
    """The yardstick of this site: a copy of its first model, trained on its own texts only, then tested."""
    before = site.learner.state()
    losses = site.train_privately(task.epochs, task.practice)
    scores = {**site.test_scores(), "loss": losses[-1]}
    site.learner.load_state(before)
    return Scores(scores)


@site_verb("query.save", leaves=NOTHING, phase=None, quick=True, shield=Shield(("ledger",)))
def save(site: Node, keep: Keep) -> Kept:
    """Put the model and its optimizers away as the checkpoint of a round."""
    facts = {"site": site.name, "round": keep.number, "trained": site.trained_by}
    checkpoint.save(site.checkpoints, keep.number, site.state(copy=False), facts)
    return Kept(site.ledger.head())


@site_verb("query.restore", leaves=NOTHING, phase=None, quick=True, shield=Shield())
def restore(site: Node, keep: Keep) -> Nothing:
    """Take up the checkpoint of a round."""
    arrays, facts = checkpoint.load(site.checkpoints, keep.number)
    site.check_origin(facts)
    site.load_state(arrays)
    return Nothing()
