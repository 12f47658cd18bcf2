"""PerCFL. Sattler et al., "Clustered Federated Learning: Model-Agnostic Distributed Multitask Optimization Under
Privacy Constraints", IEEE Transactions on Neural Networks and Learning Systems 2021."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from pydantic import Field

from fedstill.common.maths.ensemble import uniform
from fedstill.common.maths.similarity import (
    cosines,
    halves,
    inner_products,
    length_if_unrelated,
    mean_length,
    should_split,
)
from fedstill.common.wire import Reply
from fedstill.strategies.base import Round, names
from fedstill.strategies.parameters import ParameterParams, updates
from fedstill.strategies.personal import PersonalMethod

if TYPE_CHECKING:
    from fedstill.common.checkpoint import Nested
    from fedstill.server.federation import Federation


class PerCFLParams(ParameterParams):
    """When a cluster splits: after `warmup_rounds`, its mean update shorter than eps1 and some site's above eps2.

    Lengths are `relative`: eps1 to the length that a mean of unrelated updates would have, so that below 1 the sites
    pull against each other; eps2 to the mean length in the run's first round. `absolute` ones hold for one model and
    one learning rate.
    """

    lengths: Literal["relative", "absolute"] = "relative"
    eps1: float = Field(1.0, gt=0)
    eps2: float = Field(0.3, gt=0)
    warmup_rounds: int = Field(20, ge=0)
    weights: Literal["size", "uniform"] = "size"


class PerCFL(PersonalMethod):
    """One model for each cluster; a cluster whose sites pull apart is split in two by the cosines of their updates."""

    name = "percfl"
    paper = "Sattler et al. 2021"
    parameters = PerCFLParams
    presets: ClassVar = {
        "paper": {},
        "authors_code": {
            "lengths": "absolute", "eps1": 0.4, "eps2": 1.6, "weights": "uniform", "schedule": "call"
        },
    }  # fmt: skip
    p: PerCFLParams

    def prepare(self, fed: Federation) -> None:
        super().prepare(fed)
        self.clusters: dict[str, int] = {}  # of the sites that are not in the first cluster, 0
        self.pace = 0.0  # the mean length of the first round's updates

    def key_of(self, site: str) -> str:
        """The number of the site's cluster."""
        return str(self.clusters.get(site, 0))

    def shares(self, replies: list[Reply]) -> dict[str, float]:
        """w_k by size, or the same for every site as in the authors' program."""
        return super().shares(replies) if self.p.weights == "size" else uniform(names(replies))

    def round(self, fed: Federation) -> Round:
        replies = yield self.training(fed)
        if self.p.lengths == "relative" and self.pace == 0.0:
            self.pace = mean_length(inner_products(updates(replies, self.models(names(replies)))))
        if fed.number > self.p.warmup_rounds:
            for cluster in sorted({self.key_of(r.node) for r in replies}, key=int):
                self._split(fed, cluster, [r for r in replies if self.key_of(r.node) == cluster])
        clusters = {site: int(self.key_of(site)) for site in fed.sites}
        fed.event("clusters", clusters=clusters)
        self.average(replies)
        self.show_mean(replies)
        self.copies.only(names((yield self.giving_back(fed, replies))))
        return {**self.loss(replies), "clusters": len(set(clusters.values()))}

    def _split(self, fed: Federation, cluster: str, members: list[Reply]) -> None:
        """Two clusters where there was one, if it is time; who did not answer stays with the larger part."""
        products = inner_products(updates(members, self.models(names(members))))
        shares = np.array(list(self.shares(members).values()))
        relative = self.p.lengths == "relative"
        unrelated, pace = (length_if_unrelated(products, shares), self.pace) if relative else (1.0, 1.0)
        if not should_split(products, shares, self.p.eps1 * unrelated, self.p.eps2 * pace):
            return
        part = halves(cosines(products))
        leaving = int(part.sum() * 2 <= len(part))  # the smaller part gets a new number
        fresh = max(self.clusters.values(), default=0) + 1
        self.states[str(fresh)] = self.state_of(cluster)
        self.clusters.update({r.node: fresh for r, half in zip(members, part, strict=True) if half == leaving})
        parts = [[r.node for r in members if (self.key_of(r.node) == cluster) == stays] for stays in (True, False)]
        fed.event("split", cluster=int(cluster), parts=parts)

    def state(self) -> Nested:
        """The clusters and their states."""
        numbers = {site: np.array(number) for site, number in self.clusters.items()}
        return {**super().state(), "cluster": numbers, "pace": np.array(self.pace)}

    def load_state(self, state: Nested) -> None:
        """Restore what `state` returned."""
        super().load_state(state)
        self.clusters = {site: int(number) for site, number in state.get("cluster", {}).items()}
        self.pace = float(state.get("pace", 0.0))
