"""logit-FedAvg: what Xiao and Liu, "Adaptive Federated Distillation ... Textual Data", 2025, compare with as FedAvg."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np

from fedstill.common.maths.ensemble import softmax
from fedstill.common.wire import Reply
from fedstill.strategies.base import RESTARTING, RestartingMethod, RestartingParams, Round, names
from fedstill.strategies.early import Distillation, EarlyParams
from fedstill.strategies.formulas import both_ways
from fedstill.strategies.generic import Train, train_locally
from fedstill.strategies.predictions import Distil, EnsembleMethod, EnsembleParams, ask_predictions, distil

if TYPE_CHECKING:
    from fedstill.common.models.learner import Loss
    from fedstill.server.federation import Federation


class LogitFedAvgParams(EnsembleParams, RestartingParams, EarlyParams):
    """Every site counts once."""

    weights: Literal["size", "uniform"] = "uniform"


class LogitFedAvg(EnsembleMethod, RestartingMethod):
    """The central model learns the mean of logits; its own logits go back as hard labels."""

    name = "logit-fedavg"
    paper = "baseline of Xiao and Liu 2025"
    parameters = LogitFedAvgParams
    presets: ClassVar = {"paper": {}, "authors_code": RESTARTING}
    formula = staticmethod(both_ways)
    p: LogitFedAvgParams

    def round(self, fed: Federation) -> Round:
        rows, epochs, sites = fed.public_rows, self.p.distill_epochs, fed.participants
        for calls, practice in self.calls(fed, self.p.local_epochs):
            sites = names((yield train_locally.ask(Train(calls, practice), to=sites)))
        (calls, practice), *later = self.calls(fed, epochs)
        distillation = Distillation(fed, rows, calls, practice, self.p.pipeline)

        def learn(replies: list[Reply], rows: np.ndarray) -> Loss:
            return fed.central.towards(softmax(self.mean_logits(replies)), "kl")

        replies = yield from distillation.predictions(partial(ask_predictions, fed), sites, learn)
        whole, sites = learn(replies, rows), names(replies)
        loss = distillation.finish(whole)
        for calls, practice in later:
            loss = fed.central.fit_public(rows, whole, calls, practice)
        targets = fed.central.predict(rows)
        for calls, practice in self.calls(fed, epochs):
            lesson = Distil(rows, targets, "hard", calls, replace(practice, dropout=self.p.distill_dropout))
            sites = names((yield distil.ask(lesson, to=sites)))
        return {"loss": loss}
