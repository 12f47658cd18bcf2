"""FedMD. Li and Wang, "FedMD: Heterogenous Federated Learning via Model Distillation", 2019."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from pydantic import Field

from fedstill.common.maths.ensemble import Matrix, softmax
from fedstill.common.randomness import derive
from fedstill.common.wire import Reply
from fedstill.strategies.base import Round, mean_loss, names
from fedstill.strategies.formulas import both_ways
from fedstill.strategies.predictions import WarmedMethod, WarmedParams, ask_predictions

if TYPE_CHECKING:
    from fedstill.common.models.learner import Loss
    from fedstill.server.federation import Federation


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
    formula = staticmethod(both_ways)
    p: FedMDParams

    def round(self, fed: Federation) -> Round:
        sites = yield from self.warm_up(fed)  # transfer learning
        rows = self.subset(fed)
        distillation = self.distillation(fed, rows, self.p.pipeline)

        def learn(replies: list[Reply], rows: np.ndarray) -> Loss:
            return fed.central.towards(self.targets(replies), self.p.loss)

        replies = yield from distillation.predictions(partial(ask_predictions, fed), sites, learn)  # communicate
        digest = self.distil_at_sites(fed, rows, self.targets(replies), self.p.loss, names(replies))
        digest, central = distillation.beside(digest, learn(replies, rows))
        digested = yield digest
        revisited = yield self.train_locally(fed, to=names(digested))  # revisit
        return {"loss": central.result(), "site_loss": mean_loss(revisited)}

    def targets(self, replies: list[Reply]) -> Matrix:
        """Aggregate."""
        scores = self.mean_logits(replies)
        return scores if self.p.loss == "l1" else softmax(scores)

    def subset(self, fed: Federation) -> np.ndarray:
        """The round's public rows, drawn from the seed."""
        everything = fed.public_rows
        if self.p.subset >= len(everything):
            return everything
        rng = np.random.default_rng(derive(fed.config.seed, "public subset", fed.number))
        return np.sort(rng.choice(everything, self.p.subset, replace=False))
