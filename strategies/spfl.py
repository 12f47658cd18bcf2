"""SPFL, approximate. Xie et al., "Personalized Heterogeneous Federated Learning with Gradient Similarity", 2022."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedstill.common.maths.similarity import attention, cosines, inner_products, moved
from fedstill.common.wire import Reply
from fedstill.strategies.base import Round, names
from fedstill.strategies.parameters import updates
from fedstill.strategies.personal import PersonalMethod

if TYPE_CHECKING:
    from fedstill.server.federation import Federation


class SPFL(PersonalMethod):
    """A model for each site: w_n + sum_i a_ni Delta_i, a_n by how alike the sites' updates are."""

    name = "spfl"
    paper = "Xie et al. 2022"

    def round(self, fed: Federation) -> Round:
        replies = yield self.training(fed)
        self._move(replies)
        self.show_mean(replies)
        self.copies.only(names((yield self.giving_back(fed, replies))))
        return self.loss(replies)

    def _move(self, replies: list[Reply]) -> None:
        began = self.models(r.node for r in replies)
        a = attention(cosines(inner_products(updates(replies, began))))
        moved_states = {r.node: dict(began[r.node]) for r in replies}
        for name, value in self.first.items():
            if value.dtype.kind == "f":
                deltas = {r.node: r.arrays[name] - began[r.node][name] for r in replies}
                for site, row in zip(deltas, a, strict=True):
                    moved_states[site][name] = moved(began[site][name], deltas, dict(zip(deltas, row, strict=True)))
            else:
                for r in replies:
                    moved_states[r.node][name] = r.arrays[name]
        self.states.update(moved_states)
