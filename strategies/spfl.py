"""SPFL, approximate. Xie et al., "Personalized Heterogeneous Federated Learning with Gradient Similarity", 2022."""

from __future__ import annotations

from fedstill.common.maths.similarity import attention, cosines, inner_products, moved
from fedstill.common.wire import Reply
from fedstill.strategies.base import Round
from fedstill.strategies.parameters import updates
from fedstill.strategies.personal import PersonalMethod


class SPFL(PersonalMethod):
    """A model for each site: w_n + sum_i a_ni Delta_i, a_n by how alike the sites' updates are."""

    name = "spfl"
    paper = "Xie et al. 2022"

    def round(self, number: int) -> Round:
        replies = yield self.training()
        self._move(replies)
        self.show_mean(replies)
        self.held((yield self.giving_back(replies)))
        return self.loss(replies)

    def _move(self, replies: list[Reply]) -> None:
        began = self.models(r.node for r in replies)
        a = attention(cosines(inner_products(updates(replies, began))))
        found = {r.node: dict(began[r.node]) for r in replies}
        for name, value in self.states.first.items():
            if value.dtype.kind == "f":
                deltas = {r.node: r.arrays[name] - began[r.node][name] for r in replies}
                for site, row in zip(deltas, a, strict=True):
                    found[site][name] = moved(began[site][name], deltas, dict(zip(deltas, row, strict=True)))
            else:
                for r in replies:
                    found[r.node][name] = r.arrays[name]
        for site, state in found.items():
            self.states[site] = state
