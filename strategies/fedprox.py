"""FedProx. Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020."""

from __future__ import annotations

from pydantic import Field

from fedstill.common.wire import Facts
from fedstill.strategies.fedavg import FedAvg
from fedstill.strategies.parameters import ParameterParams


class FedProxParams(ParameterParams):
    """mu holds the sites back near the global model."""

    mu: float = Field(0.001, gt=0)


class FedProx(FedAvg):
    """FedAvg with mu/2 ||w - w_global||^2 over the shared parameters added to each site's loss."""

    name = "fedprox"
    paper = "Li et al. 2020"
    parameters = FedProxParams
    p: FedProxParams

    def site_settings(self) -> Facts:
        return {"mu": self.p.mu}
