"""Training on the private texts, and on targets that the server gives for public ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from fedstill.client.verbs.registry import Answer, practice_of, verb
from fedstill.common.data.tasks import scores
from fedstill.common.maths.losses import LOSSES, soft_cross_entropy
from fedstill.common.maths.weights import class_losses, mean_entropy
from fedstill.common.models.learner import Practice, Rows
from fedstill.common.wire import Ask, Facts

if TYPE_CHECKING:
    from fedstill.client.node import Node


@verb("train.local")
def local(node: Node, ask: Ask) -> Answer:
    """E epochs of CE on the private texts, from the given weights if there are any (FedID eqs. 1, 2, 4)."""
    if ask.arrays:
        node.learner.load_weights(ask.arrays)
    losses = node.train_privately(int(ask.settings["epochs"]), practice_of(ask))
    metrics = {"texts": len(node.private), "loss": losses[-1], "losses": losses}
    if ask.settings.get("describe") and len(node.private):
        metrics.update(_described(node))
    return (node.learner.weights() if ask.settings.get("send_weights") else {}), metrics


def _described(node: Node) -> Facts:
    """How the model fits the private texts, in a few numbers (AdaFD)."""
    logits, labels = node.learner.predict(node.private, np.arange(len(node.private))), node.labels.cpu().numpy()
    found = {"entropy": mean_entropy(logits), "class_losses": class_losses(logits, labels)}
    return {**found, "f1_weighted": scores("f1_weighted", labels, logits)["f1_weighted"]}


@verb("train.distil")
def distil(node: Node, ask: Ask) -> Answer:
    """E_d epochs towards the given targets on public rows (eq. 8), among the private texts if asked (Cronus)."""
    rows = node.public_rows(ask.arrays["rows"])
    targets = node.targets(ask.arrays["targets"], len(rows))
    if ask.settings.get("private"):
        losses = _train_on_both(node, rows, targets, int(ask.settings["epochs"]), practice_of(ask))
        return {}, {"texts": len(node.private), "loss": losses[-1]}
    loss, temperature = LOSSES[ask.settings["loss"]], float(ask.settings.get("temperature", 1.0))
    losses = node.learner.fit(
        node.public,
        rows,
        lambda logits, places: loss(logits / temperature, targets[places]),
        int(ask.settings["epochs"]),
        "distil",
        practice_of(ask),
    )
    return {}, {"loss": losses[-1]}


def _train_on_both(node: Node, rows: Rows, targets: Tensor, epochs: int, practice: Practice) -> list[float]:
    """Soft CE on private and public texts shuffled together; a private text's target is its label."""
    wanted = torch.cat([one_hot(node.labels, len(node.task.labels)).to(targets), targets])
    return node.learner.fit(
        node.private.followed_by(node.public),
        np.concatenate([np.arange(len(node.private)), len(node.private) + rows]),
        lambda logits, places: soft_cross_entropy(logits, wanted[places]),
        epochs,
        "local",
        practice,
    )
