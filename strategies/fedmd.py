"""FedMD. Li and Wang, "FedMD: Heterogenous Federated Learning via Model Distillation", 2019."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from fedstill.common.maths.ensemble import softmax
from fedstill.common.randomness import derive
from fedstill.strategies.base import Round
from fedstill.strategies.predictions import WarmedMethod, WarmedParams, mean_loss, names


class FedMDParams(WarmedParams):
    """`distill_epochs` are those of digest, `local_epochs` those of revisit."""

    subset: int = Field(5000, ge=1)  # public texts drawn for a round, or all if there are fewer
    loss: Literal["l1", "kl"] = "l1"


class FedMD(WarmedMethod):
    """Sites digest their mean scores, then revisit their texts. The central model (ours) learns the same scores."""

    name = "fedmd"
    paper = "Li and Wang 2019"
    parameters = FedMDParams
    presets: ClassVar = {"paper": {}, "authors_code": {}}
    p: FedMDParams

    def round(self, number: int) -> Round:
        sites = yield from self.warm_up(number)  # transfer learning
        rows = self._subset(number)
        replies = yield self.ask_predictions(rows, sites)  # communicate
        scores = self.mean_logits(replies)  # aggregate
        targets = scores if self.p.loss == "l1" else softmax(scores)
        digested = yield self.distil_at_sites(rows, targets, self.p.loss, names(replies))  # digest
        revisited = yield replace(self.local_training(), to=names(digested))  # revisit
        return {
            "loss": self.distil_at_server(rows, targets, self.p.loss),
            "site_loss": mean_loss(revisited),
        }

    def _subset(self, number: int) -> np.ndarray:
        """The round's public rows, drawn from the seed."""
        everything = self.public_rows
        if self.p.subset >= len(everything):
            return everything
        rng = np.random.default_rng(derive(self.config.seed, "public subset", number))
        return np.sort(rng.choice(everything, self.p.subset, replace=False))
