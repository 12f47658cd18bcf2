"""FedKD. Gong et al., "Preserving Privacy in Federated Learning with Ensemble ... Distillation", AAAI 2022."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field

from fedstill.common.maths.ensemble import Matrix, by_class, mean_predictions, softmax
from fedstill.common.maths.losses import LOSSES, kl_divergence
from fedstill.common.wire import Reply
from fedstill.common.wire.checks import class_counts
from fedstill.common.wire.typed import Message
from fedstill.strategies.base import FRESH_EACH_CALL, Round, names
from fedstill.strategies.early import EarlyParams
from fedstill.strategies.formulas import once
from fedstill.strategies.predictions import (
    EnsembleMethod,
    EnsembleParams,
    TaughtMethod,
    TaughtParams,
    ask_predictions,
    logits_of,
)
from fedstill.strategies.verbs import Nothing, site_verb

if TYPE_CHECKING:
    from fedstill.client.node import Node
    from fedstill.common.models.learner import Loss
    from fedstill.server.federation import Federation


class FedKDParams(EnsembleParams, TaughtParams, EarlyParams):
    """`class_weights`: n_kc / sum_k n_kc on the logit of class c, instead of one weight a site."""

    class_weights: bool = False
    loss: Literal["mse", "l1", "kl"] = "mse"
    temperature: float = Field(1.0, gt=0)  # of kl alone


class FedKD(EnsembleMethod, TaughtMethod):
    """One shot: sites train, predict once, and the central model learns; nothing goes back."""

    name = "fedkd"
    paper = "Gong et al. 2022"
    parameters = FedKDParams
    presets: ClassVar = {
        "paper": {"class_weights": True, "loss": "l1"},
        "authors_code": FRESH_EACH_CALL,
        "fedid": {"class_weights": False, "loss": "mse"},  # as in FedID's tables
        "adafd": {"class_weights": False, "loss": "kl"},  # as in AdaFD's
    }
    formula = staticmethod(once("class counts"))
    p: FedKDParams

    def prepare(self, fed: Federation) -> None:
        super().prepare(fed)
        if fed.config.rounds > 1:
            raise ValueError(
                f"fedkd is one shot, all of it happens in the first round, and rounds is {fed.config.rounds}; "
                "set rounds = 1, and method.local_epochs and method.distill_epochs as high as the run should go"
            )
        if self.p.class_weights and self.p.aggregation != "mean":
            raise ValueError(
                f"method.aggregation = {self.p.aggregation!r} counts every site once, so class weights have no place; "
                "set method.class_weights = false, or method.aggregation = 'mean'"
            )

    def averages_predictions(self) -> bool:
        return super().averages_predictions() and not self.p.class_weights

    def round(self, fed: Federation) -> Round:
        rows = fed.public_rows
        sites = names((yield self.train_locally(fed)))
        counts = {}
        if self.p.class_weights:
            counted = yield count_classes.ask(to=sites, check=class_counts(fed.central.classes))
            counts = {r.node: r.arrays["counts"] for r in counted}
            sites = tuple(counts)
        distillation = self.distillation(fed, rows, self.p.pipeline)

        def learn(replies: list[Reply], rows: np.ndarray) -> Loss:
            return self._loss(self._combine(replies, counts), fed.central.learner.model.device)

        replies = yield from distillation.predictions(partial(ask_predictions, fed), sites, learn)
        if self.p.class_weights:
            shown = {name: weights.tolist() for name, weights in _by_class(replies, counts).items()}
            fed.event("weights", weighting="class", weights=shown)
        loss = distillation.finish(learn(replies, rows))
        self.learn_labelled(fed)
        return {"loss": loss}

    def _combine(self, replies: list[Reply], counts: Mapping[str, np.ndarray]) -> Matrix:
        if not self.p.class_weights:
            return self.mean_logits(replies)
        return mean_predictions(logits_of(replies), _by_class(replies, counts))

    def _loss(self, z: Matrix, device: torch.device) -> Loss:
        t = self.p.temperature
        if self.p.loss == "kl":
            y = torch.from_numpy(softmax(z, t)).to(device)
            return lambda logits, places: t * t * kl_divergence(logits / t, y[places])
        wanted = torch.from_numpy(z).to(device)
        return lambda logits, places: LOSSES[self.p.loss](logits, wanted[places])


def _by_class(replies: list[Reply], counts: Mapping[str, np.ndarray]) -> dict[str, NDArray[np.float64]]:
    """w_kc over the sites that answered."""
    return by_class({r.node: counts[r.node] for r in replies})


# --- the site's half ---


@dataclass(frozen=True)
class ClassCounts(Message):
    """n_kc: how many private texts of each class, zeros included."""

    counts: np.ndarray
    texts: int


@site_verb("query.counts", leaves="counts", phase="class counts")
def count_classes(site: Node, nothing: Nothing) -> ClassCounts:
    """n_kc of this site's private texts; C numbers travel."""
    counts = torch.bincount(site.labels, minlength=len(site.task.labels))
    return ClassCounts(counts.cpu().numpy(), len(site.private))
