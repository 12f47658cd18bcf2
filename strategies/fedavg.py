"""FedAvg. McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017."""

from __future__ import annotations

from fedstill.common.states import State
from fedstill.common.wire import Reply
from fedstill.strategies.base import Round
from fedstill.strategies.parameters import ParameterMethod


class FedAvg(ParameterMethod):
    """Weights go down, E local epochs, weights come up, and their mean by size is the central model."""

    name = "fedavg"
    paper = "McMahan et al. 2017"

    def round(self, number: int) -> Round:
        replies = yield self.training()
        self.update(self.aggregate(number, replies))
        self.held((yield self.giving_back(replies)))
        return self.loss(replies)

    def aggregate(self, number: int, replies: list[Reply]) -> State:
        """The mean by size (FedID eq. 3); other rules stand here in Flower's strategies."""
        return self.mean(replies)
