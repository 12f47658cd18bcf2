"""Ma et al., "FedID: Federated Interactive Distillation for Large-Scale Pretraining Language Models", EMNLP 2023."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import ConfigDict, Field, model_validator

from fedstill.common.maths.ensemble import by_size, softmax
from fedstill.common.maths.feedback import Jacobian, through_softmax
from fedstill.common.maths.robust import Aggregation, combine
from fedstill.common.models.learner import Practice
from fedstill.common.wire import Ask, Facts, Reply, items, predictions
from fedstill.strategies.base import Method, Params, Round

NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class FedIDParams(Params):
    """Eqs. 10 to 15. `votes` (authors' code) has the server learn the sites' weighted hard votes instead of eq. 11."""

    model_config = ConfigDict(populate_by_name=True)

    distill_epochs: int = Field(3, ge=1)
    feedback: Literal["none", "scalar", "scalar_eval", "exact"] = "scalar"
    lambda_: NotNegative | Literal["1/eta"] = Field(
        1.0, alias="lambda"
    )  # 1/eta: as if eta, which is in h and G, were 1
    aggregation: Aggregation = "mean"  # rules beside `mean` count every site once
    jacobian: Jacobian = "auto"  # of `exact`: by forward mode, or by two more forward passes
    server_optimizer: Literal["adamw", "sgd"] = "adamw"
    distil: bool = True  # off: the ablation without g_distill
    average: Literal["probabilities", "logits"] = "probabilities"
    target: Literal["soft", "votes"] = "soft"
    dropout: bool = False  # predict and validate in train mode, as the authors' code does
    batch_size: int | None = Field(None, ge=1)  # public texts an exchange; by default the central model's batch

    @model_validator(mode="after")
    def _goes_together(self) -> FedIDParams:
        if self.feedback == "exact" and self.server_optimizer == "adamw" and self.optimizer_state == "fresh":
            raise ValueError(
                "feedback = 'exact' has no useful derivative through the first step of a fresh AdamW, which is all but "
                "a sign; set optimizer_state = 'persistent', or server_optimizer = 'sgd' (with a larger "
                "central.distill_rate), or feedback = 'scalar'"
            )
        if self.feedback == "exact" and self.aggregation != "mean":
            raise ValueError(
                "feedback = 'exact' is the derivative by a weighted mean; set aggregation = 'mean', or another feedback"
            )
        if self.feedback == "none" and not self.distil:
            raise ValueError("feedback = 'none' with distil = false leaves the sites nothing to learn; change one")
        return self


@dataclass(frozen=True)
class Feedback:
    """What the central step tells the sites: h, or the matrix G."""

    scale: float  # lambda
    h: float = 0.0
    matrix: np.ndarray | None = None


class FedID(Method):
    """After local training, one exchange a public mini-batch: predictions up, ensemble and feedback down."""

    name = "fedid"
    paper = "Ma et al. 2023"
    parameters = FedIDParams
    presets: ClassVar = {
        "paper": {},
        "authors_code": {
            "average": "logits",
            "target": "votes",
            "dropout": True,
            "optimizer_state": "fresh",
            "schedule": "call",
        },
    }
    p: FedIDParams

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        if self.p.feedback == "exact" and self.config.train.clip is not None:
            raise ValueError(
                "feedback = 'exact' is the derivative through the whole step, and train.clip cuts it; take one out"
            )
        if self.p.feedback != "none" and not len(self.student.labelled):
            raise ValueError(
                "fedid's feedback is measured on the server's labelled texts, and data.labelled is 0; give it some, "
                "or set method.feedback = 'none'"
            )

    def round(self, number: int) -> Round:
        trained = yield self.local_training()  # step 1
        sites = tuple(r.node for r in trained)
        batches = self._batches()
        loss = 0.0
        replies = yield self._first(batches[0], sites)
        for i, rows in enumerate(batches):  # step 2
            weights = by_size({r.node: r.metrics["texts"] for r in replies})
            if i == 0 and self.p.aggregation == "mean":
                self.record.event("weights", round=number, weighting="size", weights=weights)
            ensemble, target = self._combine(replies, weights)  # 2b, eq. 10
            practice = self.practice(i / len(batches), (i + 1) / len(batches))
            back, loss = self._central_step(number, i, rows, ensemble, target, practice)  # 2c, 2d, eqs. 11, 12
            following = batches[i + 1] if i + 1 < len(batches) else None
            replies = yield self._feedback(rows, following, ensemble, back, weights, practice, sites)  # 2e, 2f
            self.record.progress("interactive", i + 1, len(batches), round=number, loss=loss)
        return {"loss": loss}

    def _batches(self) -> list[np.ndarray]:
        """E_d passes over the public set in its fixed order."""
        size = self.p.batch_size or self.student.learner.batch_size
        once = [self.public_rows[start : start + size] for start in range(0, len(self.public_rows), size)]
        return once * self.p.distill_epochs

    def _first(self, rows: np.ndarray, sites: tuple[str, ...]) -> Ask:
        check = predictions(rows, self.student.classes)
        return Ask("query.logits", {"rows": rows}, {"dropout": self.p.dropout}, to=sites, check=check)

    def _combine(self, replies: list[Reply], weights: dict[str, float]) -> tuple[np.ndarray, np.ndarray]:
        """What the sites are told (y, or z for its argmax) and what the central model learns."""
        logits, rule = {r.node: r.arrays["logits"] for r in replies}, self.p.aggregation
        if self.p.average == "probabilities":
            y = combine({name: softmax(z) for name, z in logits.items()}, weights, rule, probabilities=True)
        else:
            y = softmax(combine(logits, weights, rule))
        if self.p.target == "soft":
            return y, y
        votes = {name: np.eye(self.student.classes, dtype=np.float32)[z.argmax(axis=-1)] for name, z in logits.items()}
        return y, combine(votes, weights, rule, probabilities=True)

    def _central_step(
        self, number: int, i: int, rows: np.ndarray, ensemble: np.ndarray, target: np.ndarray, practice: Practice
    ) -> tuple[Feedback, float]:
        """One step of the central model, and what it says of the target: how it moved the loss on a labelled batch."""
        student, mode = self.student, self.p.feedback
        practice = replace(practice, optimizer=self.p.server_optimizer)
        eta = student.learner.rate("distil", practice)
        scale = (1.0 / eta if eta else 0.0) if self.p.lambda_ == "1/eta" else self.p.lambda_
        if mode == "none":
            return Feedback(scale), student.step(rows, target, practice)
        query = student.draw_labelled(len(rows), number, i)
        if mode == "exact":
            matrix, loss = student.step_with_feedback(
                rows, target, query, practice, eta, self.p.dropout, self.p.jacobian
            )
            if self._feedback_of == "logits":
                matrix = through_softmax(matrix, torch.from_numpy(ensemble).to(matrix))
            return Feedback(scale, matrix=matrix.cpu().numpy()), loss
        dropout = self.p.dropout and mode == "scalar"
        old = student.validate(query, dropout)
        loss = student.step(rows, target, practice)
        return Feedback(scale, old - student.validate(query, dropout)), loss

    @property
    def _feedback_of(self) -> str:
        """What G differentiates by. A vote stands in for the site's probabilities (straight-through)."""
        return "logits" if self.p.average == "logits" and self.p.target == "soft" else "probabilities"

    def _feedback(
        self,
        rows: np.ndarray,
        following: np.ndarray | None,
        ensemble: np.ndarray,
        back: Feedback,
        weights: dict[str, float],
        practice: Practice,
        sites: tuple[str, ...],
    ) -> Ask:
        """One frame: the feedback for this batch and the rows of the next one."""
        settings: Facts = {
            "distil": self.p.distil,
            "loss": "soft" if self.p.target == "soft" else "hard",
            "feedback": "scalar" if self.p.feedback == "scalar_eval" else self.p.feedback,
            "h": back.h,
            "lambda": back.scale,
            "feedback_of": self._feedback_of,
            "dropout": self.p.dropout,
            **self.told(practice),
        }
        arrays = {"answered": items(rows), "ensemble": ensemble}
        if back.matrix is not None:
            arrays["feedback"] = back.matrix
        check = None
        if following is not None:
            arrays["rows"] = following
            check = predictions(following, self.student.classes)
        each = {name: {"weight": weights.get(name, 0.0)} for name in sites}
        return Ask("train.feedback", arrays, settings, each, to=sites, check=check)
