"""FedProx. Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pydantic import Field

from fedstill.strategies.fedavg import FedAvg
from fedstill.strategies.parameters import ParameterParams, TrainShared
from fedstill.strategies.verbs import Verb

if TYPE_CHECKING:
    from fedstill.server.federation import Federation


class FedProxParams(ParameterParams):
    """mu holds the sites back near the global model."""

    mu: float = Field(0.001, gt=0)


class FedProx(FedAvg):
    """FedAvg with mu/2 ||w - w_global||^2 over the shared parameters added to each site's loss."""

    name = "fedprox"
    paper = "Li et al. 2020"
    parameters = FedProxParams
    p: FedProxParams

    def site_training(self, fed: Federation) -> tuple[Verb, TrainShared]:
        verb, task = super().site_training(fed)
        return verb, replace(task, mu=self.p.mu)
