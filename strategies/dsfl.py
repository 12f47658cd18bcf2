"""DS-FL. Itahara et al., "Distillation-Based Semi-Supervised Federated Learning", IEEE TMC 2021."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from fedstill.common.maths.ensemble import by_size, entropy_reduction, softmax, uniform
from fedstill.common.maths.robust import Aggregation, combine
from fedstill.common.wire import Ask, predictions
from fedstill.strategies.base import Method, Params, Round


class DSFLParams(Params):
    """Original: mean of probabilities, uniform weights, soft targets. FedID's code: mean of logits, hard targets."""

    distill_epochs: int = Field(3, ge=1)
    temperature: float = Field(0.1, gt=0)
    era_input: Literal["probs", "logits"] = "probs"
    target: Literal["soft", "hard"] = "soft"
    weights: Literal["uniform", "size"] = "uniform"
    aggregation: Aggregation = "mean"  # the others count every site once


class DSFL(Method):
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
            "optimizer_state": "fresh",
            "schedule": "call",
        },
    }
    p: DSFLParams

    def round(self, number: int) -> Round:
        rows = self.public_rows
        local = yield self.local_training()
        replies = yield Ask(
            "query.predictions",
            {"rows": rows},
            to=tuple(r.node for r in local),
            check=predictions(rows, self.student.classes),
        )
        sizes = {r.node: r.metrics["texts"] for r in replies}
        weights = by_size(sizes) if self.p.weights == "size" else uniform(list(sizes))
        probs = self.p.era_input == "probs"
        said = {r.node: softmax(r.arrays["logits"]) if probs else r.arrays["logits"] for r in replies}
        targets = entropy_reduction(combine(said, weights, self.p.aggregation, probs), self.p.temperature)
        practice, loss = self.practice(), self.p.target
        distilled = self.student.distil(rows, targets, loss, self.p.distill_epochs, practice)
        settings = {"loss": loss, "epochs": self.p.distill_epochs, **self.told(practice)}
        yield Ask("train.distil", {"rows": rows, "targets": targets}, settings, to=tuple(sizes))
        return {"loss": distilled}
