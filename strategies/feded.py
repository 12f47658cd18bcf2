"""FedED. Sui et al., "Federated Learning via Ensemble Distillation for Medical Relation Extraction", EMNLP 2020."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np

from fedstill.common.maths.ensemble import softmax
from fedstill.common.wire import Reply
from fedstill.strategies.base import FRESH_EACH_CALL, Round, names
from fedstill.strategies.early import EarlyParams
from fedstill.strategies.formulas import weights_down
from fedstill.strategies.generic import Train, train_locally
from fedstill.strategies.predictions import EnsembleMethod, EnsembleParams, ask_predictions

if TYPE_CHECKING:
    from fedstill.common.models.learner import Loss
    from fedstill.server.federation import Federation


class FedEDParams(EnsembleParams, EarlyParams):
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
        distillation = self.distillation(fed, rows, self.p.pipeline)

        def learn(replies: list[Reply], rows: np.ndarray) -> Loss:
            logits = self.p.average == "logits"
            y = softmax(self.mean_logits(replies)) if logits else self.mean_probabilities(replies)
            return fed.central.towards(y, "kl")

        replies = yield from distillation.predictions(partial(ask_predictions, fed), names(trained), learn)
        return {"loss": distillation.finish(learn(replies, rows))}
