"""Cronus. Chang et al., "Cronus: Robust and Heterogeneous Collaborative Learning", 2019."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from fedstill.common.maths.robust import Aggregation
from fedstill.common.wire import Reply
from fedstill.strategies.base import Round, mean_loss, names
from fedstill.strategies.formulas import both_ways
from fedstill.strategies.predictions import Distil, WarmedMethod, WarmedParams, ask_predictions, distil

if TYPE_CHECKING:
    from fedstill.common.models.learner import Loss
    from fedstill.server.federation import Federation


class CronusParams(WarmedParams):
    """`local_epochs` pass over private and public texts together; `distill_epochs` are the central model's."""

    aggregation: Aggregation = "cronus"


class Cronus(WarmedMethod):
    """Sites train on their texts and, together with them, on the filtered mean of their probabilities."""

    name = "cronus"
    paper = "Chang et al. 2019"
    parameters = CronusParams
    presets: ClassVar = {"paper": {}, "authors_code": {}}
    formula = staticmethod(both_ways)
    p: CronusParams

    def round(self, fed: Federation) -> Round:
        rows, sites = fed.public_rows, (yield from self.warm_up(fed))  # step 1
        distillation = self.distillation(fed, rows, self.p.pipeline)

        def learn(replies: list[Reply], rows: np.ndarray) -> Loss:
            return fed.central.towards(self.mean_probabilities(replies), "soft")

        replies = yield from distillation.predictions(partial(ask_predictions, fed), sites, learn)  # step 2
        y = self.mean_probabilities(replies)  # step 3
        lesson = Distil(rows, y, "soft", self.p.local_epochs, self.practice(fed), private=True)
        asking, central = distillation.beside(distil.ask(lesson, to=names(replies)), fed.central.towards(y, "soft"))
        trained = yield asking  # step 4
        return {"loss": central.result(), "site_loss": mean_loss(trained)}
