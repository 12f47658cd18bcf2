"""FedID. Ma et al., "Federated Interactive Distillation for Large-Scale Pretraining Language Models", EMNLP 2023."""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from fedstill.common.learner import Practice
from fedstill.common.maths.ensemble import by_size, mean_predictions, softmax
from fedstill.common.wire import Ask, Facts, Reply, predictions
from fedstill.strategies.base import Method, Params, Round


class FedIDParams(Params):
    """Eqs. 10 to 15. `votes` (authors' code) has the server learn the sites' weighted hard votes instead of eq. 11."""

    distill_epochs: int = Field(3, ge=1)
    feedback: Literal["none", "scalar"] = "scalar"
    distil: bool = True  # off: the ablation without g_distill
    average: Literal["probabilities", "logits"] = "probabilities"
    target: Literal["soft", "votes"] = "soft"
    dropout: bool = False  # predict and validate in train mode, as the authors' code does
    batch_size: int | None = Field(None, ge=1)  # public texts an exchange; by default the central model's batch


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

    def round(self, number: int) -> Round:
        trained = yield self.local_training()  # step 1
        sites = tuple(r.node for r in trained)
        batches = self._batches()
        loss = 0.0
        replies = yield self._first(batches[0], sites)
        for i, rows in enumerate(batches):  # step 2
            weights = by_size({r.node: r.metrics["texts"] for r in replies})
            ensemble, target = self._combine(replies, weights)  # 2b, eq. 10
            practice = self.practice(i / len(batches), (i + 1) / len(batches))
            h, loss = self._central_step(number, i, rows, target, practice)  # 2c, 2d, eqs. 11, 12
            following = batches[i + 1] if i + 1 < len(batches) else None
            replies = yield self._feedback(rows, following, ensemble, h, weights, practice, sites)  # 2e, 2f
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
        logits = {r.node: r.arrays["logits"] for r in replies}
        if self.p.average == "probabilities":
            y = mean_predictions({name: softmax(z) for name, z in logits.items()}, weights)
        else:
            y = softmax(mean_predictions(logits, weights))
        if self.p.target == "soft":
            return y, y
        votes = {name: np.eye(self.student.classes, dtype=np.float32)[z.argmax(axis=-1)] for name, z in logits.items()}
        return y, mean_predictions(votes, weights)

    def _central_step(
        self, number: int, i: int, rows: np.ndarray, target: np.ndarray, practice: Practice
    ) -> tuple[float, float]:
        """One step of the central model, and h: how much it lowered the loss on a labelled batch."""
        if self.p.feedback == "none":
            return 0.0, self.student.step(rows, target, practice)
        query = self.student.draw_labelled(len(rows), number, i)
        old = self.student.validate(query, self.p.dropout)
        loss = self.student.step(rows, target, practice)
        return old - self.student.validate(query, self.p.dropout), loss

    def _feedback(
        self,
        rows: np.ndarray,
        following: np.ndarray | None,
        ensemble: np.ndarray,
        h: float,
        weights: dict[str, float],
        practice: Practice,
        sites: tuple[str, ...],
    ) -> Ask:
        """One frame: the feedback for this batch and the rows of the next one."""
        settings: Facts = {
            "distil": self.p.distil,
            "loss": "soft" if self.p.target == "soft" else "hard",
            "feedback": self.p.feedback,
            "h": h,
            "dropout": self.p.dropout,
            **self.told(practice),
        }
        arrays = {"answered": rows, "ensemble": ensemble}
        check = None
        if following is not None:
            arrays["rows"] = following
            check = predictions(following, self.student.classes)
        each = {name: {"weight": weights.get(name, 0.0)} for name in sites}
        return Ask("train.feedback", arrays, settings, each, to=sites, check=check)
