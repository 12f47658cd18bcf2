"""DS-FL. Itahara et al., "Distillation-Based Semi-Supervised Federated Learning", IEEE TMC 2021."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from fedstill.common.maths.ensemble import entropy_reduction
from fedstill.strategies.base import FRESH_EACH_CALL, Round, names
from fedstill.strategies.formulas import both_ways
from fedstill.strategies.predictions import EnsembleMethod, EnsembleParams, TaughtMethod, TaughtParams, ask_predictions
from fedstill.strategies.secure_sum import summed

if TYPE_CHECKING:
    from fedstill.server.federation import Federation


class DSFLParams(EnsembleParams, TaughtParams):
    """Original: mean of probabilities, uniform weights, soft targets. FedID's code: mean of logits, hard targets."""

    temperature: float = Field(0.1, gt=0)
    era_input: Literal["probs", "logits"] = "probs"
    target: Literal["soft", "hard"] = "soft"
    weights: Literal["size", "uniform"] = "uniform"


class DSFL(EnsembleMethod, TaughtMethod):
    """Sites predict the whole public set; server and sites distil the sharpened mean."""

    name = "ds-fl"
    paper = "Itahara et al. 2021"
    parameters = DSFLParams
    presets: ClassVar = {
        "paper": {},
        "authors_code": {
            "era_input": "logits",
            "target": "hard",
            "weights": "size",
            **FRESH_EACH_CALL,
        },
        "fedid": {"era_input": "logits", "target": "hard", "weights": "size"},  # as in FedID's tables
        "adafd": {"era_input": "logits", "weights": "size"},  # as in AdaFD's
    }
    formula = staticmethod(both_ways)
    p: DSFLParams

    def why_no_sums(self) -> str | None:
        return None if self.p.aggregation == "mean" else "with a robust aggregation compares the sites' answers"

    def round(self, fed: Federation) -> Round:
        rows = fed.public_rows
        trained = yield self.train_locally(fed)  # update
        logits = self.p.era_input == "logits"
        ask = ask_predictions(fed, rows, names(trained))
        replies = yield summed(ask, "values" if logits else "probabilities", self.p.weights)  # predict, upload
        mean = self.mean_logits(replies) if logits else self.mean_probabilities(replies)
        targets = entropy_reduction(mean, self.p.temperature)  # aggregate: ERA
        loss = self.distil_at_server(fed, rows, targets, self.p.target)
        self.learn_labelled(fed)
        yield self.distil_at_sites(fed, rows, targets, self.p.target, names(replies))  # broadcast, distil
        return {"loss": loss}
