"""Verbs that every run uses: train on the private texts, be tested, keep a checkpoint and take it up again."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fedstill.common import checkpoint
from fedstill.common.practice import Practice
from fedstill.common.states import State
from fedstill.common.wire import Facts
from fedstill.common.wire.typed import Message
from fedstill.strategies.verbs import NOTHING, Nothing, site_verb

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


@site_verb("train.local", leaves=NOTHING, phase="local training")
def train_locally(site: Node, task: Train) -> Trained:
    """E epochs of CE on the private texts (FedID eqs. 1, 2, 4)."""
    if task.weights:
        site.learner.load_weights(task.weights)
    losses = site.train_privately(task.epochs, task.practice)
    return Trained(len(site.private), losses[-1], losses)


@site_verb("evaluate.test", leaves=NOTHING, phase="evaluation")
def evaluate(site: Node, nothing: Nothing) -> Scores:
    """The task's scores on the test texts."""
    return Scores(site.test_scores())


@site_verb("evaluate.alone", leaves=NOTHING, phase="alone")
def evaluate_alone(site: Node, task: Train) -> Scores:
    """The yardstick of this site: a copy of its first model, trained on its own texts only, then tested."""
    before = site.learner.state()
    losses = site.train_privately(task.epochs, task.practice)
    scores = {**site.test_scores(), "loss": losses[-1]}
    site.learner.load_state(before)
    return Scores(scores)


@site_verb("query.save", leaves=NOTHING, phase=None, quick=True)
def save(site: Node, keep: Keep) -> Nothing:
    """Put the model and its optimizers away as the checkpoint of a round."""
    checkpoint.save(site.checkpoints, keep.number, site.state(), {"site": site.name, "round": keep.number})
    return Nothing()


@site_verb("query.restore", leaves=NOTHING, phase=None, quick=True)
def restore(site: Node, keep: Keep) -> Nothing:
    """Take up the checkpoint of a round."""
    arrays, _ = checkpoint.load(site.checkpoints, keep.number)
    site.load_state(arrays)
    return Nothing()
