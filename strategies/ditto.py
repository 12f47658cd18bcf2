"""Ditto. Li et al., "Ditto: Fair and Robust Federated Learning Through Personalization", ICML 2021."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from pydantic import Field

from fedstill.common.states import State
from fedstill.common.wire.typed import Message, named
from fedstill.strategies.base import Round
from fedstill.strategies.fedavg import FedAvg
from fedstill.strategies.parameters import ParameterParams, TrainShared, shared_part, take, train_near
from fedstill.strategies.verbs import Verb, site_verb

if TYPE_CHECKING:
    from fedstill.client.node import Node
    from fedstill.server.federation import Federation


class DittoParams(ParameterParams):
    """lambda ties v to the global model; two models train at a site, so that no optimizer can live on."""

    strength: float = Field(0.1, gt=0, alias="lambda")
    optimizer_state: Literal["fresh"] = "fresh"


class Ditto(FedAvg):
    """FedAvg, and beside it a model v of each site's own, trained with lambda/2 ||v - w_global||^2; v is tested."""

    name = "ditto"
    paper = "Li et al. 2021"
    parameters = DittoParams
    formula = None
    p: DittoParams

    def site_training(self, fed: Federation) -> tuple[Verb, TrainShared]:
        task = super().site_training(fed)[1]
        return train_ditto, TrainBoth(task.epochs, task.practice, task.private, strength=self.p.strength)

    def round(self, fed: Federation) -> Round:
        replies = yield self.training(fed)
        self.update(self.aggregate(fed, replies))
        return {**self.loss(replies), **self.loss(replies, "own_loss")}


# --- the site's half ---


@dataclass(frozen=True)
class TrainBoth(TrainShared):
    """The shared model's training, and lambda of the site's own."""

    strength: float = named("lambda", default=0.1)


@dataclass(frozen=True)
class TrainedBoth(Message):
    """The shared parameters; v stays."""

    texts: int
    loss: float
    own_loss: float
    weights: State


@site_verb("train.ditto", leaves="weights", phase="local training")
def train_ditto(site: Node, task: TrainBoth) -> TrainedBoth:
    """The shared model as in FedAvg, then the site's own v near w_global; v is what the site has and tests."""
    v = site.learner.whole()
    kept = site.kept.get("ditto", {})  # the private parts of the shared model, from the second round on
    site.learner.load_whole({**v, **{name: value for name, value in kept.items() if name != "begun"}})
    take(site, task.private, task.weights)
    loss = train_near(site, task.epochs, task.practice, {}, 0.0)
    shared = shared_part(site, task.private)
    private = {name: value for name, value in site.learner.whole().items() if name not in shared}
    site.kept["ditto"] = {**private, "begun": np.ones(1, np.int8)}
    site.learner.load_whole(v if "begun" in kept else {**v, **task.weights})  # v begins as the first w_global
    own_loss = train_near(site, task.epochs, task.practice, task.weights, task.strength)
    return TrainedBoth(site.size, loss, own_loss, shared)
