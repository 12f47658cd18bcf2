"""FedAUX at a site: how much each auxiliary text looks like its own, sent once."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

from fedstill.client.verbs.registry import Answer, verb
from fedstill.common.config import ModelConfig
from fedstill.common.maths import certainty
from fedstill.common.models.features import text_features
from fedstill.common.models.loading import load_model
from fedstill.common.wire import Ask, WireError, items

if TYPE_CHECKING:
    from fedstill.client.node import Node


MODEL = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


@verb("query.scores")
def scores(node: Node, ask: Ask) -> Answer:
    """s_k(x) of the public rows, by a regression of the private texts against other public ones; noise if asked."""
    rows, others = node.public_rows(ask.arrays["rows"]), node.public_rows(ask.arrays["negatives"])
    if not len(others) or not len(node.private):
        raise WireError("scores need private texts and negatives")
    told = ask.settings
    if not MODEL.fullmatch(str(told["extractor"])):
        raise WireError(
            f"extractor {str(told['extractor'])[:80]!r}: the server may name a model, not a folder of this site"
        )
    length, keep = node.config.train.max_length, node.config.train.keep
    settings = ModelConfig(name=str(told["extractor"]), max_length=length, keep=keep, device=node.site.device)
    extractor = load_model(settings, node.task, seed=0)
    public = text_features(extractor, node.texts.public.texts)
    own = text_features(extractor, node.texts.private.texts)
    regulariser = float(told["regulariser"])
    found = certainty.fit(own, public[others], regulariser, bool(told["per_text"]))
    if told.get("epsilon") is not None:
        texts = len(own) + len(others)
        variance = certainty.noise_variance(texts, regulariser, float(told["epsilon"]), float(told["delta"]))
        # The server knows the run's seed: noise that follows from it would hide nothing from the server.
        found = certainty.with_noise(found, variance, np.random.default_rng())
    return {"items": items(rows), "scores": certainty.scores(found, public[rows])}, {"texts": len(node.private)}
