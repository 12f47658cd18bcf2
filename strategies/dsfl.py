"""DS-FL. Itahara et al., "Distillation-Based Semi-Supervised Federated Learning", IEEE TMC 2021."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from pydantic import Field, model_validator

from fedstill.common.maths.ensemble import Matrix, entropy_reduction, softmax
from fedstill.common.wire import Ask, Reply
from fedstill.strategies.base import FRESH_EACH_CALL, Round, names
from fedstill.strategies.early import NO_SUMS, EarlyParams
from fedstill.strategies.formulas import both_ways
from fedstill.strategies.predictions import EnsembleMethod, EnsembleParams, TaughtMethod, TaughtParams, ask_predictions
from fedstill.strategies.secure_sum import summed

if TYPE_CHECKING:
    from fedstill.server.federation import Federation


class DSFLParams(EnsembleParams, TaughtParams, EarlyParams):
    """Original: mean of probabilities, uniform weights, soft targets. FedID's code: mean of logits, hard targets."""

    reduction: Literal["era", "none"] = "era"  # none: the paper's simple aggregation, for comparison
    temperature: float = Field(0.1, gt=0)
    era_input: Literal["probs", "logits"] = "probs"
    target: Literal["soft", "hard"] = "soft"
    weights: Literal["size", "uniform"] = "uniform"

    @model_validator(mode="after")
    def _sharpened(self) -> DSFLParams:
        if self.reduction == "none" and "temperature" in self.model_fields_set:
            raise ValueError("reduction = 'none' takes the plain mean, which has no temperature; take one of them out")
        return self


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
        if self.p.pipeline:
            return NO_SUMS
        return None if self.p.aggregation == "mean" else "with a robust aggregation compares the sites' answers"

    def round(self, fed: Federation) -> Round:
        rows = fed.public_rows
        trained = yield self.train_locally(fed)  # update
        distillation = self.distillation(fed, rows, self.p.pipeline)

        def asking(rows: np.ndarray, sites: tuple[str, ...] | None) -> Ask:
            of: Literal["values", "probabilities"] = "values" if self.p.era_input == "logits" else "probabilities"
            return summed(ask_predictions(fed, rows, sites), of, self.p.weights)

        replies = yield from distillation.predictions(  # predict, upload
            asking, names(trained), lambda replies, _: fed.central.towards(self.targets(replies), self.p.target)
        )
        targets = self.targets(replies)
        lesson = self.distil_at_sites(fed, rows, targets, self.p.target, names(replies))
        lesson, central = distillation.beside(lesson, fed.central.towards(targets, self.p.target))
        if not self.p.pipeline:
            central.result()
        yield lesson  # broadcast, distil
        loss = central.result()
        self.learn_labelled(fed)
        return {"loss": loss}

    def targets(self, replies: list[Reply]) -> Matrix:
        """Aggregate: ERA, or the plain mean (SA)."""
        of_logits = self.p.era_input == "logits"
        mean = self.mean_logits(replies) if of_logits else self.mean_probabilities(replies)
        if self.p.reduction == "none":
            return softmax(mean) if of_logits else mean
        return entropy_reduction(mean, self.p.temperature)
