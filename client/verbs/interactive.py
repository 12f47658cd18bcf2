"""FedID's exchange by the batch: logits that wait for their feedback, and the step it makes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from fedstill.client.verbs.registry import Answer, practice_of, verb
from fedstill.common.maths.feedback import exact_surrogate, scalar_surrogate
from fedstill.common.maths.losses import LOSSES
from fedstill.common.models.learner import Rows
from fedstill.common.wire import Ask, Facts, items

if TYPE_CHECKING:
    from fedstill.client.node import Node


@dataclass
class Pending:
    """A predicted batch that waits for feedback: its rows, where in the run, and its graph if still in memory."""

    rows: Rows
    place: tuple[int, int]
    dropout: bool
    logits: Tensor | None = None


@verb("query.logits")
def logits(node: Node, ask: Ask) -> Answer:
    """Logits of one public batch; it stays pending until its feedback comes (FedID step 2a)."""
    rows = node.public_rows(ask.arrays["rows"])
    place = (int(ask.settings.get("round", 0)), int(ask.settings.get("step", 0)))
    dropout = bool(ask.settings.get("dropout"))
    found = node.learner.logits(node.public, rows, dropout)
    node.pending = Pending(rows, place, dropout, found)
    return {"items": items(rows), "logits": found.detach().cpu().numpy()}, {"texts": len(node.private)}


@verb("train.feedback")
def feedback(node: Node, ask: Ask) -> Answer:
    """Update on the pending batch (FedID step 2f), then predict the next one if the Ask names its rows."""
    metrics: Facts = {"texts": len(node.private)}
    pending, node.pending = node.pending, None
    if pending is not None and np.array_equal(items(pending.rows), ask.arrays["answered"]):
        metrics["loss"] = _step(node, pending, ask)
    if "rows" not in ask.arrays:
        return {}, metrics
    arrays, _ = logits(node, ask)
    return arrays, metrics


def _step(node: Node, pending: Pending, ask: Ask) -> float:
    """g_distill + g_feedback: CE(y, f_k) + lambda w_k <G, f_k>, or the scalar lambda w_k h CE(f_k, argmax z_k)."""
    predicted = pending.logits
    if predicted is None:  # another process predicted it: the same weights at the same place give the same graph
        with node.learner.at(*pending.place):
            predicted = node.learner.logits(node.public, pending.rows, pending.dropout)
    loss = torch.zeros((), device=predicted.device)
    if ask.settings["distil"]:
        loss = loss + LOSSES[ask.settings["loss"]](predicted, node.targets(ask.arrays["ensemble"], len(predicted)))
    share = float(ask.settings["weight"]) * float(ask.settings.get("lambda", 1.0))
    if ask.settings["feedback"] == "scalar":
        loss = loss + scalar_surrogate(predicted, share * float(ask.settings["h"]))
    elif ask.settings["feedback"] == "exact":
        told = node.targets(ask.arrays["feedback"], len(predicted))
        loss = loss + share * exact_surrogate(predicted, told, ask.settings["feedback_of"])
    node.learner.one_step(loss, "distil", practice_of(ask))
    return float(loss.detach())
