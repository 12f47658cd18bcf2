"""Tests, and the yardstick of a site alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedstill.client.verbs.registry import Answer, practice_of, verb
from fedstill.common.wire import Ask

if TYPE_CHECKING:
    from fedstill.client.node import Node


@verb("evaluate.test")
def evaluate(node: Node, ask: Ask) -> Answer:
    """The task's scores on the test texts."""
    return {}, node.test_scores()


@verb("evaluate.alone")
def alone(node: Node, ask: Ask) -> Answer:
    """The yardstick of this site: a copy of its first model, trained on its own texts only, then tested."""
    before = node.learner.state()
    losses = node.train_privately(int(ask.settings["epochs"]), practice_of(ask))
    metrics = {**node.test_scores(), "loss": losses[-1]}
    node.learner.load_state(before)
    return {}, metrics
