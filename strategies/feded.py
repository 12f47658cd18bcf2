"""FedED. Sui et al., "Federated Learning via Ensemble Distillation for Medical Relation Extraction", EMNLP 2020."""

from __future__ import annotations

from typing import ClassVar, Literal

from fedstill.common.maths.ensemble import softmax
from fedstill.common.wire import Ask
from fedstill.strategies.base import Round
from fedstill.strategies.predictions import EnsembleMethod, EnsembleParams, names


class FedEDParams(EnsembleParams):
    """What the ensemble is the mean of."""

    average: Literal["probabilities", "logits"] = "probabilities"


class FedED(EnsembleMethod):
    """Weights go down, E local epochs from them, predictions come up, and the central model learns their mean."""

    name = "feded"
    paper = "Sui et al. 2020"
    parameters = FedEDParams
    presets: ClassVar = {
        "paper": {"optimizer_state": "fresh"},
        "authors_code": {"average": "logits", "optimizer_state": "fresh", "schedule": "call"},
    }
    needs_same_models = True
    p: FedEDParams

    def round(self, number: int) -> Round:
        rows = self.public_rows
        settings = {"epochs": self.p.local_epochs, **self.told(self.practice())}
        trained = yield Ask("train.local", self.student.weights(), settings)
        replies = yield self.ask_predictions(rows, names(trained))
        logits = self.p.average == "logits"
        y = softmax(self.mean_logits(replies)) if logits else self.mean_probabilities(replies)
        return {"loss": self.distil_at_server(rows, y, "kl")}
