"""FedED. Sui et al., "Federated Learning via Ensemble Distillation for Medical Relation Extraction", EMNLP 2020."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from fedstill.common.maths.ensemble import softmax
from fedstill.strategies.base import FRESH_EACH_CALL, Round, names
from fedstill.strategies.formulas import weights_down
from fedstill.strategies.generic import Train, train_locally
from fedstill.strategies.predictions import EnsembleMethod, EnsembleParams, ask_predictions

if TYPE_CHECKING:
    from fedstill.server.federation import Federation


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
        "authors_code": {"average": "logits", **FRESH_EACH_CALL},
    }
    needs_same_models = True
    formula = staticmethod(weights_down)
    p: FedEDParams

    def round(self, fed: Federation) -> Round:
        rows = fed.public_rows
        trained = yield train_locally.ask(Train(self.p.local_epochs, self.practice(fed), fed.central.weights()))
        replies = yield ask_predictions(fed, rows, names(trained))
        logits = self.p.average == "logits"
        y = softmax(self.mean_logits(replies)) if logits else self.mean_probabilities(replies)
        return {"loss": self.distil_at_server(fed, rows, y, "kl")}
