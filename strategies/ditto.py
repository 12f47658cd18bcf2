"""Ditto. Li et al., "Ditto: Fair and Robust Federated Learning Through Personalization", ICML 2021."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from fedstill.common.wire import Facts
from fedstill.strategies.base import Round
from fedstill.strategies.fedavg import FedAvg
from fedstill.strategies.parameters import ParameterParams


class DittoParams(ParameterParams):
    """lambda ties v to the global model; two models train at a site, so that no optimizer can live on."""

    strength: float = Field(0.1, gt=0, alias="lambda")
    optimizer_state: Literal["fresh"] = "fresh"


class Ditto(FedAvg):
    """FedAvg, and beside it a model v of each site's own, trained with lambda/2 ||v - w_global||^2; v is tested."""

    name = "ditto"
    paper = "Li et al. 2021"
    parameters = DittoParams
    verb = "train.ditto"
    p: DittoParams

    def site_settings(self) -> Facts:
        return {"lambda": self.p.strength}

    def round(self, number: int) -> Round:
        replies = yield self.training()
        self.update(self.aggregate(number, replies))
        return {**self.loss(replies), **self.loss(replies, "own_loss")}
