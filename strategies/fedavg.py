"""FedAvg. McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from fedstill.common.states import State
from fedstill.common.wire import Reply
from fedstill.strategies.base import Round, names
from fedstill.strategies.formulas import Formula, weights_both_ways
from fedstill.strategies.parameters import ParameterMethod
from fedstill.strategies.secure_sum import summed

if TYPE_CHECKING:
    from fedstill.server.federation import Federation


class FedAvg(ParameterMethod):
    """Sites get the weights, train E epochs and upload them; their mean by size is the central model."""

    name = "fedavg"
    paper = "McMahan et al. 2017"
    formula: ClassVar[Formula | None] = staticmethod(weights_both_ways)

    def round(self, fed: Federation) -> Round:
        replies = yield summed(self.training(fed), "values")  # ClientUpdate: strategies/parameters.py, train_shared
        self.update(self.aggregate(fed, replies))
        self.copies.only(names((yield self.giving_back(fed, replies))))
        return self.loss(replies)

    def why_no_sums(self) -> str | None:
        mine = type(self).round is FedAvg.round and type(self).aggregate is FedAvg.aggregate
        return None if mine else super().why_no_sums()

    def aggregate(self, fed: Federation, replies: list[Reply]) -> State:
        """The mean by size (FedID eq. 3); other rules stand here in Flower's strategies."""
        return self.mean(replies)
