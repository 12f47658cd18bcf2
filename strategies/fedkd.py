"""FedKD. Gong et al., "Preserving Privacy in Federated Learning with Ensemble ... Distillation", AAAI 2022."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedstill.common.maths.ensemble import Matrix, by_class, mean_predictions, softmax
from fedstill.common.maths.losses import LOSSES, kl_divergence
from fedstill.common.models.learner import Rows
from fedstill.common.wire import Ask, class_counts
from fedstill.strategies.base import Round
from fedstill.strategies.predictions import EnsembleMethod, EnsembleParams, names


class FedKDParams(EnsembleParams):
    """`class_weights`: n_kc / sum_k n_kc on the logit of class c, instead of one weight a site."""

    class_weights: bool = False
    loss: Literal["mse", "l1", "kl"] = "mse"
    temperature: float = Field(1.0, gt=0)  # of kl alone


class FedKD(EnsembleMethod):
    """One shot: sites train, predict once, and the central model learns; nothing goes back."""

    name = "fedkd"
    paper = "Gong et al. 2022"
    parameters = FedKDParams
    presets: ClassVar = {
        "paper": {"class_weights": True, "loss": "l1"},
        "authors_code": {"optimizer_state": "fresh", "schedule": "call"},
    }
    p: FedKDParams

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        if self.config.rounds > 1:
            raise ValueError(
                f"fedkd is one shot, all of it happens in the first round, and rounds is {self.config.rounds}; "
                "set rounds = 1, and method.local_epochs and method.distill_epochs as high as the run should go"
            )
        if self.p.class_weights and self.p.aggregation != "mean":
            raise ValueError(
                f"method.aggregation = {self.p.aggregation!r} counts every site once, so class weights have no place; "
                "set method.class_weights = false, or method.aggregation = 'mean'"
            )

    def round(self, number: int) -> Round:
        rows = self.public_rows
        sites = names((yield self.local_training()))
        counts = {}
        if self.p.class_weights:
            counted = yield Ask("query.counts", to=sites, check=class_counts(self.student.classes))
            counts = {r.node: r.arrays["counts"] for r in counted}
            sites = tuple(counts)
        replies = yield self.ask_predictions(rows, sites)
        if self.p.class_weights:
            weights = by_class({r.node: counts[r.node] for r in replies})
            shown = {name: weight.tolist() for name, weight in weights.items()}
            self.record.event("weights", round=number, weighting="class", weights=shown)
            z = mean_predictions({r.node: r.arrays["logits"] for r in replies}, weights)
        else:
            z = self.mean_logits(replies)
        return {"loss": self.student.fit_public(rows, self._loss(z), self.p.distill_epochs, self.practice())}

    def _loss(self, z: Matrix) -> Callable[[Tensor, Rows], Tensor]:
        device, t = self.student.learner.model.device, self.p.temperature
        if self.p.loss == "kl":
            y = torch.from_numpy(softmax(z, t)).to(device)
            return lambda logits, places: t * t * kl_divergence(logits / t, y[places])
        wanted = torch.from_numpy(z).to(device)
        return lambda logits, places: LOSSES[self.p.loss](logits, wanted[places])
