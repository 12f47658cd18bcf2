"""Cronus. Chang et al., "Cronus: Robust and Heterogeneous Collaborative Learning", 2019."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Literal

from pydantic import Field

from fedstill.common.maths.robust import Aggregation
from fedstill.common.wire import Ask
from fedstill.strategies.base import Round
from fedstill.strategies.predicting import EnsembleMethod, EnsembleParams, mean_loss, names


class CronusParams(EnsembleParams):
    """`local_epochs` pass over private and public texts together; `distill_epochs` are the central model's."""

    weights: Literal["size", "uniform"] = "uniform"
    aggregation: Aggregation = "cronus"
    warmup_epochs: int = Field(3, ge=1)  # on the private texts, once


class Cronus(EnsembleMethod):
    """Sites train on their texts and, together with them, on the filtered mean of their probabilities."""

    name = "cronus"
    paper = "Chang et al. 2019"
    parameters = CronusParams
    presets: ClassVar = {"paper": {}, "authors_code": {}}
    p: CronusParams

    def round(self, number: int) -> Round:
        rows, sites = self.public_rows, self.participants
        if number == 1:  # step 1, for those too that are drawn for later rounds only
            warm = replace(self.local_training(), to=tuple(self.link.sites))
            warmed = yield replace(warm, settings={**warm.settings, "epochs": self.p.warmup_epochs})
            sites = tuple(name for name in names(warmed) if name in sites)
        replies = yield self.ask_predictions(rows, sites)  # step 2
        y = self.mean_probabilities(replies)  # step 3
        settings = {"private": True, "loss": "soft", "epochs": self.p.local_epochs, **self.told(self.practice())}
        trained = yield Ask("train.distil", {"rows": rows, "targets": y}, settings, to=names(replies))  # step 4
        return {
            "loss": self.distil_at_server(rows, y, "soft"),
            "site_loss": mean_loss(trained),
        }
