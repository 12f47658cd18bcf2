"""FedDF. Lin et al., "Ensemble Distillation for Robust Model Fusion in Federated Learning", NeurIPS 2020."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from fedstill.common.config import LearnerConfig
from fedstill.common.maths.ensemble import by_size, mean_arrays, softmax
from fedstill.common.wire import Ask, Reply
from fedstill.common.wire.checks import same_shapes
from fedstill.strategies.base import (
    BALANCED,
    FRESH_EACH_CALL,
    BalancedMethod,
    BalancedParams,
    Round,
    names,
    texts_of,
)
from fedstill.strategies.formulas import weights_both_ways
from fedstill.strategies.parameters import TrainShared, take_weights, train_shared
from fedstill.strategies.predictions import EnsembleMethod, EnsembleParams

if TYPE_CHECKING:
    from fedstill.common.checkpoint import Nested
    from fedstill.server.central import CentralModel
    from fedstill.server.federation import Federation


class FedDFParams(EnsembleParams, BalancedParams):
    """Weights of the ensemble's logits; parameters are averaged by size."""


class FedDF(EnsembleMethod, BalancedMethod):
    """One prototype a model: the mean of its members' weights, then taught by the ensemble of all sites' models."""

    name = "feddf"
    paper = "Lin et al. 2020"
    parameters = FedDFParams
    presets: ClassVar = {
        "paper": {"weights": "uniform", **FRESH_EACH_CALL},
        "authors_code": FRESH_EACH_CALL,
        "feddrs": {"weights": "uniform", "distill_epochs": 1, **BALANCED},
    }
    formula = staticmethod(weights_both_ways)
    p: FedDFParams

    def prepare(self, fed: Federation) -> None:
        self.fed = fed

    @cached_property
    def prototypes(self) -> dict[str, CentralModel]:
        """The server's model of each kind; the central model is the one of its own kind, with or without members."""
        config, listed = self.fed.config, {_kind(site): site for site in reversed(self.fed.config.sites)}
        prototypes = {_kind(config.central): self.fed.central}
        for kind in (self._kind_of(site) for site in self.fed.sites):
            if kind not in prototypes:  # the site's model on the server's machine
                like = listed.get(kind) or LearnerConfig(model=kind)
                hardware = {name: getattr(config.central, name) for name in ("device", "precision", "threads")}
                settings = {name: getattr(like, name) for name in LearnerConfig.model_fields} | hardware
                prototypes[kind] = self.fed.central.another(LearnerConfig(**settings))
        return prototypes

    def _kind_of(self, site: str) -> str:
        return str(self.fed.sites[site]["model"])

    def round(self, fed: Federation) -> Round:  # Algorithm 1, or 3 with prototypes
        for prototype in self.prototypes.values():
            prototype.begin_round(fed.number)
        uploaded = yield self._train()
        logits = []
        for reply in uploaded:  # the server runs every received model
            prototype = self.prototypes[self._kind_of(reply.node)]
            prototype.load_weights(reply.arrays)
            logits.append(Reply(reply.node, {"logits": prototype.predict(fed.public_rows)}, reply.metrics))
        y = softmax(self.mean_logits(logits))
        losses = {kind: self._fuse(kind, uploaded, y) for kind in self.prototypes}
        states = {kind: prototype.weights() for kind, prototype in self.prototypes.items()}
        back = {site: {"weights": states[self._kind_of(site)]} for site in names(uploaded)}
        self.copies.only(names((yield take_weights.ask(each=back, to=tuple(back)))))
        return {"loss": losses[_kind(fed.config.central)], "losses": losses}

    def _train(self) -> Ask:
        """E epochs from the prototype, which only goes to sites that do not hold it already; weights come up."""
        states = {kind: prototype.weights() for kind, prototype in self.prototypes.items()}
        shapes = {kind: same_shapes(state) for kind, state in states.items()}
        lacking = self.copies.lacking(self.fed.participants)
        each = {site: {"weights": states[self._kind_of(site)]} for site in lacking}
        task = TrainShared(self.p.local_epochs, self.practice(self.fed), most=self.most_texts(self.fed))
        return train_shared.ask(task, each=each, check=lambda reply: shapes[self._kind_of(reply.node)](reply))

    def _fuse(self, kind: str, uploaded: list[Reply], y: np.ndarray) -> float:
        """The mean of the members by size, if any answered, then E_d epochs of KL(y || p)."""
        prototype, central = self.prototypes[kind], self.fed.central
        members = [reply for reply in uploaded if self._kind_of(reply.node) == kind]
        if members:
            prototype.load_weights(mean_arrays({r.node: r.arrays for r in members}, by_size(texts_of(members))))
        practice = self.practice(self.fed)
        loss = prototype.distil(self.fed.public_rows, y, "kl", self.p.distill_epochs, practice)
        if prototype is not central:
            central.learner.compute_seconds += prototype.learner.compute_seconds
            prototype.learner.compute_seconds = 0.0
        return loss

    def _others(self) -> dict[str, CentralModel]:
        return {kind: model for kind, model in self.prototypes.items() if model is not self.fed.central}

    def state(self) -> Nested:
        """The prototypes beside the central model."""
        return {kind: prototype.learner.state() for kind, prototype in self._others().items()}

    def load_state(self, state: Nested) -> None:
        """Restore what `state` returned."""
        for kind, prototype in self._others().items():
            prototype.learner.load_state(state[kind])


def _kind(learner: LearnerConfig) -> str:
    return Path(learner.model).name
