"""Predictions on public texts, and the few numbers that weigh them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fedstill.client.verbs.registry import Answer, verb
from fedstill.common.wire import Ask, WireError, items
from fedstill.strategies.sinkhorn.noise import probability_bias

if TYPE_CHECKING:
    from fedstill.client.node import Node

MOST_NOISE = 100_000_000  # tokens that a site draws for one Ask


@verb("query.predictions")
def predictions(node: Node, ask: Ask) -> Answer:
    """Logits on public rows (eq. 5)."""
    rows = node.public_rows(ask.arrays["rows"])
    logits = node.learner.predict(node.public, rows, bool(ask.settings.get("dropout")))
    return {"items": items(rows), "logits": logits}, {"texts": len(node.private)}


@verb("query.bias")
def bias(node: Node, ask: Ask) -> Answer:
    """B_k on noise texts that are drawn here from the seed (Confident Sinkhorns 5.2); C numbers travel."""
    seed, count, length = (int(ask.settings[name]) for name in ("seed", "count", "length"))
    kind = ask.settings.get("noise", "vocabulary")
    if seed < 0 or not 1 <= count * length <= MOST_NOISE or kind not in ("vocabulary", "words"):
        raise WireError(f"no noise can be drawn for {dict(ask.settings)}; at most {MOST_NOISE:,} tokens in all")
    return {"bias": probability_bias(node.learner, seed, count, length, kind)}, {"texts": len(node.private)}


@verb("query.counts")
def counts(node: Node, ask: Ask) -> Answer:
    """n_kc: how many private texts of each class, zeros included (FedKD); C numbers travel."""
    counts = torch.bincount(node.labels, minlength=len(node.task.labels))
    return {"counts": counts.cpu().numpy()}, {"texts": len(node.private)}
