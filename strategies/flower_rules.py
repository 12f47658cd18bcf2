"""Flower's own rules (FedAdam, FedMedian, FedTrimmedAvg, Krum, MultiKrum, Bulyan) in FedAvg's place of the mean.

Reddi et al., "Adaptive Federated Optimization", ICLR 2021; Yin et al., "Byzantine-Robust Distributed Learning: Towards
Optimal Statistical Rates", ICML 2018; Blanchard et al., "Machine Learning with Adversaries: Byzantine Tolerant Gradient
Descent", NeurIPS 2017; El Mhamdi et al., "The Hidden Vulnerability of Distributed Learning in Byzantium", ICML 2018.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.serverapp import strategy as flower
from pydantic import Field

from fedstill.common.states import LazyState, State, shapes_of
from fedstill.common.wire import Arrays, Reply
from fedstill.strategies.base import Params, QuorumLost, Round
from fedstill.strategies.fedavg import FedAvg
from fedstill.strategies.flower_messages import as_message, quietly
from fedstill.strategies.parameters import ParameterParams

if TYPE_CHECKING:
    from fedstill.common.checkpoint import Nested
    from fedstill.server.federation import Federation


class FlowerRule(FedAvg):
    """A round of FedAvg in which a strategy of Flower's combines what came up, one array at a time."""

    @cached_property
    def rule(self) -> Any:
        """Flower's strategy with this method's settings."""
        raise NotImplementedError

    def why_no_sums(self) -> str | None:
        return "is a robust rule, which compares the sites' answers"

    def aggregate(self, fed: Federation, replies: list[Reply]) -> State:
        """What Flower's `aggregate_train` makes of each array; whole numbers come from the first site."""
        theta = self.shared()
        return LazyState(shapes_of(theta), lambda name: self._combined(fed.number, name, theta[name], replies))

    def _combined(self, number: int, name: str, old: np.ndarray, replies: list[Reply]) -> np.ndarray:
        if old.dtype.kind != "f":
            return replies[0].arrays[name]
        return self.apply(number, {r.node: {name: r.arrays[name]} for r in replies}, replies)[name].astype(old.dtype)

    def apply(self, number: int, states: dict[str, Arrays], replies: list[Reply]) -> Arrays:
        """Flower's rule on these arrays of the sites, in the run's order."""
        messages = [as_message(states[r.node], int(r.metrics["texts"])) for r in replies]
        with quietly():
            record, _ = self.rule.aggregate_train(number, messages)
        if record is None:
            raise QuorumLost(f"round {number}: {len(replies)} sites are too few for {self.name} ({self.p!r})")
        return {name: array.numpy() for name, array in record.items()}


class FedAdamParams(ParameterParams):
    """Adam at the server, with Flower's names and values."""

    eta: float = Field(0.1, gt=0)
    beta_1: float = Field(0.9, ge=0, lt=1)
    beta_2: float = Field(0.99, ge=0, lt=1)
    tau: float = Field(1e-3, gt=0)


class FedAdam(FlowerRule):
    """An Adam step of the central model towards the mean of the sites (Reddi et al.)."""

    name = "fedadam"
    paper = "Reddi et al. 2021"
    parameters = FedAdamParams
    p: FedAdamParams

    def __init__(self, params: Params | None = None) -> None:
        super().__init__(params)
        self.moments: dict[str, Arrays] = {"m": {}, "v": {}}

    def why_no_sums(self) -> str | None:
        return None

    @cached_property
    def rule(self) -> Any:
        return flower.FedAdam(eta=self.p.eta, beta_1=self.p.beta_1, beta_2=self.p.beta_2, tau=self.p.tau)

    def _combined(self, number: int, name: str, old: np.ndarray, replies: list[Reply]) -> np.ndarray:
        if old.dtype.kind != "f":
            return replies[0].arrays[name]
        m, v = self.moments["m"], self.moments["v"]
        self.rule.current_arrays = {name: old}
        self.rule.m_t = {name: m[name]} if name in m else None
        self.rule.v_t = {name: v[name]} if name in v else None
        combined = super()._combined(number, name, old, replies)
        m[name], v[name] = self.rule.m_t[name], self.rule.v_t[name]
        return combined

    def state(self) -> Nested:
        """Adam's two moments."""
        return self.moments

    def load_state(self, state: Nested) -> None:
        """Restore what `state` returned."""
        self.moments = {kind: dict(state.get(kind, {})) for kind in ("m", "v")}


class FedMedian(FlowerRule):
    """The median of every number (Yin et al.)."""

    name = "fedmedian"
    paper = "Yin et al. 2018"

    @cached_property
    def rule(self) -> Any:
        return flower.FedMedian()


class TrimmedParams(ParameterParams):
    """beta is the share cut off at each end."""

    beta: float = Field(0.2, ge=0, lt=0.5)


class FedTrimmedAvg(FlowerRule):
    """The mean of every number without the highest and the lowest (Yin et al.)."""

    name = "fedtrimmedavg"
    paper = "Yin et al. 2018"
    parameters = TrimmedParams
    p: TrimmedParams

    @cached_property
    def rule(self) -> Any:
        return flower.FedTrimmedAvg(beta=self.p.beta)


class KrumParams(ParameterParams):
    """How many sites may lie."""

    num_malicious_nodes: int = Field(1, ge=0)


class Krum(FlowerRule):
    """The update of the one site that is nearest to its neighbours (Blanchard et al.)."""

    name = "krum"
    paper = "Blanchard et al. 2017"
    parameters = KrumParams
    p: KrumParams

    @property
    def needed(self) -> int:
        """The fewest sites for which the paper promises anything."""
        return 2 * self.p.num_malicious_nodes + 3

    @cached_property
    def rule(self) -> Any:
        return flower.Krum(num_malicious_nodes=self.p.num_malicious_nodes)

    def aggregate(self, fed: Federation, replies: list[Reply]) -> State:
        """theta + the rule on whole updates: distances of weights would drown in the weights' own size in float32."""
        if len(replies) < self.needed:
            raise QuorumLost(f"round {fed.number}: {len(replies)} sites answered and {self.name} needs {self.needed}")
        theta = self.shared()
        floats = [name for name, value in theta.items() if value.dtype.kind == "f"]
        deltas = {r.node: {name: r.arrays[name] - theta[name] for name in floats} for r in replies}
        chosen = self.apply(fed.number, deltas, replies)

        def new(name: str) -> np.ndarray:
            return theta[name] + chosen[name] if name in chosen else replies[0].arrays[name]

        return LazyState(shapes_of(theta), lambda name: new(name).astype(theta[name].dtype))

    def check_sites(self, fed: Federation) -> Round:
        taking_part = max(1, round(self.p.participation * len(fed.sites)))
        if taking_part < self.needed:
            raise ValueError(
                f"{self.name} with method.num_malicious_nodes = {self.p.num_malicious_nodes} needs {self.needed} sites "
                f"in a round and {taking_part} take part; lower it, or add sites"
            )
        return (yield from super().check_sites(fed))


class MultiKrumParams(KrumParams):
    """How many sites are averaged; by default all but those that may lie."""

    num_nodes_to_select: int | None = Field(None, ge=1)


class MultiKrum(Krum):
    """The mean of the sites with the best of Krum's scores (Blanchard et al.)."""

    name = "multikrum"
    parameters = MultiKrumParams
    p: MultiKrumParams

    def apply(self, number: int, states: dict[str, Arrays], replies: list[Reply]) -> Arrays:
        self.rule.num_nodes_to_select = self.p.num_nodes_to_select or len(replies) - self.p.num_malicious_nodes
        return super().apply(number, states, replies)

    @cached_property
    def rule(self) -> Any:
        return flower.MultiKrum(num_malicious_nodes=self.p.num_malicious_nodes)


class Bulyan(Krum):
    """Krum's choice of sites, then of every number the mean of those nearest to the median (El Mhamdi et al.)."""

    name = "bulyan"
    paper = "El Mhamdi et al. 2018"

    @property
    def needed(self) -> int:
        """The fewest sites for which the paper promises anything."""
        return 4 * self.p.num_malicious_nodes + 3

    @cached_property
    def rule(self) -> Any:
        return flower.Bulyan(num_malicious_nodes=self.p.num_malicious_nodes)
