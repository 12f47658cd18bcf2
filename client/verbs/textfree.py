"""FedDRS at a site: a share of the private texts, word embeddings that may stand still, and the label histogram."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

import numpy as np
import torch

from fedstill.client.verbs.registry import Answer, practice_of, verb
from fedstill.common.maths.losses import cross_entropy
from fedstill.common.wire import Ask

if TYPE_CHECKING:
    from fedstill.client.node import Node


@verb("train.balanced")
def balanced(node: Node, ask: Ask) -> Answer:
    """E epochs of CE from the given weights, on at most `most` private texts that are drawn for this call."""
    node.learner.load_weights(ask.arrays)
    most = int(ask.settings.get("most") or len(node.private))
    rows = torch.randperm(len(node.private)).numpy()[:most]
    labels = node.labels[torch.from_numpy(rows).to(node.labels.device)]
    with node.learner.model.frozen_embeddings() if ask.settings.get("frozen") else nullcontext():
        losses = node.learner.fit(
            node.private,
            rows,
            lambda logits, places: cross_entropy(logits, labels[places]),
            int(ask.settings["epochs"]),
            "local",
            practice_of(ask),
        )
    arrays, metrics = trained(node, ask)
    return arrays, {**metrics, "loss": losses[-1], "used": len(rows)}


@verb("query.trained")
def trained(node: Node, ask: Ask) -> Answer:
    """The model as it was last trained here, and gamma_k: how many private texts of each class."""
    counts = torch.bincount(node.labels, minlength=len(node.task.labels)).cpu().numpy()
    return {**node.learner.weights(), "gamma": counts.astype(np.int32)}, {"texts": len(node.private)}
