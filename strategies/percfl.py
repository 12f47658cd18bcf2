"""PerCFL. Sattler et al., "Clustered Federated Learning: Model-Agnostic Distributed Multitask Optimization Under
Privacy Constraints", IEEE Transactions on Neural Networks and Learning Systems 2021."""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from fedstill.common.maths.ensemble import uniform
from fedstill.common.maths.similarity import cosines, halves, inner_products, should_split
from fedstill.common.wire import Reply
from fedstill.strategies.base import Round
from fedstill.strategies.parameters import ParameterParams, updates
from fedstill.strategies.personal import PersonalMethod
from fedstill.strategies.predictions import names


class PerCFLParams(ParameterParams):
    """When a cluster splits: after `warmup_rounds`, its mean update shorter than eps1 and some site's above eps2."""

    eps1: float = Field(0.4, gt=0)
    eps2: float = Field(1.6, gt=0)
    warmup_rounds: int = Field(20, ge=0)
    weights: Literal["size", "uniform"] = "size"


class PerCFL(PersonalMethod):
    """One model for each cluster; a cluster whose sites pull apart is split in two by the cosines of their updates."""

    name = "percfl"
    paper = "Sattler et al. 2021"
    parameters = PerCFLParams
    presets: ClassVar = {"paper": {}, "authors_code": {"weights": "uniform", "schedule": "call"}}
    p: PerCFLParams

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.clusters: dict[str, int] = {}  # of the sites that are not in the first cluster, 0

    def key_of(self, site: str) -> str:
        """The number of the site's cluster."""
        return str(self.clusters.get(site, 0))

    def shares(self, replies: list[Reply]) -> dict[str, float]:
        """w_k by size, or the same for every site as in the authors' program."""
        return super().shares(replies) if self.p.weights == "size" else uniform(names(replies))

    def round(self, number: int) -> Round:
        replies = yield self.training()
        if number > self.p.warmup_rounds:
            for cluster in sorted({self.key_of(r.node) for r in replies}, key=int):
                self._split(number, cluster, [r for r in replies if self.key_of(r.node) == cluster])
        found = {site: int(self.key_of(site)) for site in self.link.sites}
        self.record.event("clusters", round=number, clusters=found)
        self.average(replies)
        self.show_mean(replies)
        self.held((yield self.giving_back(replies)))
        return {**self.loss(replies), "clusters": len(set(found.values()))}

    def _split(self, number: int, cluster: str, members: list[Reply]) -> None:
        """Two clusters where there was one, if it is time; who did not answer stays with the larger part."""
        products = inner_products(updates(members, self.models(names(members))))
        shares = np.array(list(self.shares(members).values()))
        if not should_split(products, shares, self.p.eps1, self.p.eps2):
            return
        part = halves(cosines(products))
        leaving = int(part.sum() * 2 <= len(part))  # the smaller part gets a new number
        fresh = max(self.clusters.values(), default=0) + 1
        self.states[str(fresh)] = self.states[cluster]
        self.clusters.update({r.node: fresh for r, half in zip(members, part, strict=True) if half == leaving})
        parts = [[r.node for r in members if (self.key_of(r.node) == cluster) == stays] for stays in (True, False)]
        self.record.event("split", round=number, cluster=int(cluster), parts=parts)

    def state(self) -> dict[str, np.ndarray]:
        """The clusters and their states."""
        return {**super().state(), **{f"cluster/{site}": np.array(n) for site, n in self.clusters.items()}}

    def load_state(self, arrays: dict[str, np.ndarray]) -> None:
        """Take up what `state` gave."""
        super().load_state(arrays)
        here = {name: int(value) for name, value in arrays.items() if name.startswith("cluster/")}
        self.clusters = {name.removeprefix("cluster/"): number for name, number in here.items()}
