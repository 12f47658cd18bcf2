"""What methods share that exchange predictions on the whole public set once a round."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from typing import Literal

import numpy as np
from pydantic import Field

from fedstill.common.maths.ensemble import Matrix, by_size, mean_predictions, softmax, uniform
from fedstill.common.maths.robust import Aggregation, combine
from fedstill.common.wire import Ask, Reply, predictions
from fedstill.strategies.base import Method, Params


class PredictingParams(Params):
    """What the server makes of predictions."""

    distill_epochs: int = Field(3, ge=1)
    weights: Literal["size", "uniform"] = "size"


class EnsembleParams(PredictingParams):
    """Rules beside `mean` count every site once and do not look at `weights`."""

    aggregation: Aggregation = "mean"


class PredictingMethod(Method):
    """The steps between local training and distillation."""

    p: PredictingParams

    def ask_predictions(self, rows: np.ndarray, sites: tuple[str, ...] | None = None) -> Ask:
        """Logits of the public rows, from those sites or from everybody who takes part."""
        return Ask("query.predictions", {"rows": rows}, to=sites, check=predictions(rows, self.student.classes))

    def site_weights(self, replies: list[Reply]) -> dict[str, float]:
        """w_k over the sites that answered."""
        if self.p.weights == "uniform":
            return uniform(names(replies))
        return by_size({r.node: r.metrics["texts"] for r in replies})

    def votes(self, replies: list[Reply]) -> Matrix:
        """sum_k w_k onehot(argmax z_k): soft CE against it is sum_k w_k CE(argmax z_k, f)."""
        corners = np.eye(self.student.classes, dtype=np.float32)
        said = {r.node: corners[r.arrays["logits"].argmax(axis=-1)] for r in replies}
        return mean_predictions(said, self.site_weights(replies))

    def distil_at_server(self, rows: np.ndarray, targets: Matrix, loss: str) -> float:
        """E_d epochs of the central model; its last mean loss."""
        return self.student.distil(rows, targets, loss, self.p.distill_epochs, self.practice())

    def distil_at_sites(self, rows: np.ndarray, targets: Matrix, loss: str, sites: tuple[str, ...]) -> Ask:
        """E_d epochs at each of the sites."""
        settings = {"loss": loss, "epochs": self.p.distill_epochs, **self.told(self.practice())}
        return Ask("train.distil", {"rows": rows, "targets": targets}, settings, to=sites)


class EnsembleMethod(PredictingMethod):
    """Combines what the sites say into one prediction."""

    p: EnsembleParams

    def mean_logits(self, replies: list[Reply]) -> Matrix:
        """z = sum_k w_k z_k, or the rule that stands for the mean."""
        return combine({r.node: r.arrays["logits"] for r in replies}, self.site_weights(replies), self.p.aggregation)

    def mean_probabilities(self, replies: list[Reply]) -> Matrix:
        """y = sum_k w_k softmax(z_k), or the rule that stands for the mean."""
        said = {r.node: softmax(r.arrays["logits"]) for r in replies}
        return combine(said, self.site_weights(replies), self.p.aggregation, probabilities=True)


class WarmedParams(EnsembleParams):
    """Sites count alike, and have trained on their own before the first exchange."""

    weights: Literal["size", "uniform"] = "uniform"
    warmup_epochs: int = Field(3, ge=1)  # on the private texts, once


class WarmedMethod(EnsembleMethod):
    """Begins with some epochs at every site."""

    p: WarmedParams

    def warm_up(self, number: int) -> Generator[Ask, list[Reply], tuple[str, ...]]:
        """In the first round, for those too that are drawn for later rounds only; the round's sites that are ready."""
        if number > 1:
            return self.participants
        local = replace(self.local_training(), to=tuple(self.link.sites))
        warmed = yield replace(local, settings={**local.settings, "epochs": self.p.warmup_epochs})
        return tuple(name for name in names(warmed) if name in self.participants)


def mean_loss(replies: list[Reply]) -> float | None:
    """The mean of the sites' losses, among those that tell theirs."""
    losses = [float(r.metrics["loss"]) for r in replies if "loss" in r.metrics]
    return float(np.mean(losses)) if losses else None


def names(replies: list[Reply]) -> tuple[str, ...]:
    """Who answered."""
    return tuple(r.node for r in replies)
