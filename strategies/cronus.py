"""Cronus. Chang et al., "Cronus: Robust and Heterogeneous Collaborative Learning", 2019."""

from __future__ import annotations

from typing import ClassVar

from fedstill.common.maths.robust import Aggregation
from fedstill.common.wire import Ask
from fedstill.strategies.base import Round
from fedstill.strategies.predictions import WarmedMethod, WarmedParams, mean_loss, names


class CronusParams(WarmedParams):
    """`local_epochs` pass over private and public texts together; `distill_epochs` are the central model's."""

    aggregation: Aggregation = "cronus"


class Cronus(WarmedMethod):
    """Sites train on their texts and, together with them, on the filtered mean of their probabilities."""

    name = "cronus"
    paper = "Chang et al. 2019"
    parameters = CronusParams
    presets: ClassVar = {"paper": {}, "authors_code": {}}
    p: CronusParams

    def round(self, number: int) -> Round:
        rows, sites = self.public_rows, (yield from self.warm_up(number))  # step 1
        replies = yield self.ask_predictions(rows, sites)  # step 2
        y = self.mean_probabilities(replies)  # step 3
        settings = {"private": True, "loss": "soft", "epochs": self.p.local_epochs, **self.told(self.practice())}
        trained = yield Ask("train.distil", {"rows": rows, "targets": y}, settings, to=names(replies))  # step 4
        return {
            "loss": self.distil_at_server(rows, y, "soft"),
            "site_loss": mean_loss(trained),
        }
