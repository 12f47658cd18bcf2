"""logit-FedAvg: what Xiao and Liu, "Adaptive Federated Distillation ... Textual Data", 2025, compare with as FedAvg."""

from __future__ import annotations

from typing import ClassVar, Literal

from fedstill.common.maths.ensemble import softmax
from fedstill.strategies.base import Round
from fedstill.strategies.predictions import EnsembleMethod, EnsembleParams, names


class LogitFedAvgParams(EnsembleParams):
    """Every site counts once."""

    weights: Literal["size", "uniform"] = "uniform"


class LogitFedAvg(EnsembleMethod):
    """The central model learns the mean of logits; its own logits go back as hard labels."""

    name = "logit-fedavg"
    paper = "baseline of Xiao and Liu 2025"
    parameters = LogitFedAvgParams
    presets: ClassVar = {"paper": {}, "authors_code": {"optimizer_state": "fresh", "schedule": "call"}}
    p: LogitFedAvgParams

    def round(self, number: int) -> Round:
        rows = self.public_rows
        trained = yield self.local_training()
        replies = yield self.ask_predictions(rows, names(trained))
        loss = self.distil_at_server(rows, softmax(self.mean_logits(replies)), "kl")
        yield self.distil_at_sites(rows, self.student.predict(rows), "hard", names(replies))
        return {"loss": loss}
