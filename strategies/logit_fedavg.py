"""logit-FedAvg: what Xiao and Liu, "Adaptive Federated Distillation ... Textual Data", 2025, compare with as FedAvg."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np

from fedstill.common.maths.ensemble import softmax
from fedstill.common.wire import Reply
from fedstill.strategies.base import FRESH_EACH_CALL, Round, names
from fedstill.strategies.early import EarlyParams
from fedstill.strategies.formulas import both_ways
from fedstill.strategies.predictions import EnsembleMethod, EnsembleParams, ask_predictions

if TYPE_CHECKING:
    from fedstill.common.models.learner import Loss
    from fedstill.server.federation import Federation


class LogitFedAvgParams(EnsembleParams, EarlyParams):
    """Every site counts once."""

    weights: Literal["size", "uniform"] = "uniform"


class LogitFedAvg(EnsembleMethod):
    """The central model learns the mean of logits; its own logits go back as hard labels."""

    name = "logit-fedavg"
    paper = "baseline of Xiao and Liu 2025"
    parameters = LogitFedAvgParams
    presets: ClassVar = {"paper": {}, "authors_code": FRESH_EACH_CALL}
    formula = staticmethod(both_ways)
    p: LogitFedAvgParams

    def round(self, fed: Federation) -> Round:
        rows = fed.public_rows
        trained = yield self.train_locally(fed)
        distillation = self.distillation(fed, rows, self.p.pipeline)

        def learn(replies: list[Reply], rows: np.ndarray) -> Loss:
            return fed.central.towards(softmax(self.mean_logits(replies)), "kl")

        replies = yield from distillation.predictions(partial(ask_predictions, fed), names(trained), learn)
        loss = distillation.finish(learn(replies, rows))
        yield self.distil_at_sites(fed, rows, fed.central.predict(rows), "hard", names(replies))
        return {"loss": loss}
