"""FedDF. Lin et al., "Ensemble Distillation for Robust Model Fusion in Federated Learning", NeurIPS 2020."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import ClassVar

import numpy as np

from fedstill.common.config import LearnerConfig
from fedstill.common.maths.ensemble import by_size, mean_arrays, softmax
from fedstill.common.wire import Ask, Reply, same_shapes
from fedstill.server.central import Student
from fedstill.strategies.base import Round
from fedstill.strategies.predictions import EnsembleMethod, EnsembleParams, names


class FedDF(EnsembleMethod):
    """One prototype a model: the mean of its members' weights, then taught by the ensemble of all sites' models."""

    name = "feddf"
    paper = "Lin et al. 2020"
    parameters = EnsembleParams
    presets: ClassVar = {
        "paper": {"weights": "uniform", "optimizer_state": "fresh", "schedule": "call"},
        "authors_code": {"optimizer_state": "fresh", "schedule": "call"},
    }
    p: EnsembleParams

    @cached_property
    def prototypes(self) -> dict[str, Student]:
        """The server's model of each kind; the central model is the one of its own kind, with or without members."""
        config, listed = self.config, {_kind(site): site for site in reversed(self.config.sites)}
        found = {_kind(config.central): self.student}
        for kind in (self._kind_of(site) for site in self.link.sites):
            if kind not in found:  # the site's model on the server's machine
                like = listed.get(kind) or LearnerConfig(model=kind)
                here = {name: getattr(config.central, name) for name in ("device", "precision", "threads")}
                central = LearnerConfig(**{name: getattr(like, name) for name in LearnerConfig.model_fields} | here)
                found[kind] = Student(config.model_copy(update={"central": central}))
        return found

    def _kind_of(self, site: str) -> str:
        return str(self.link.sites[site]["model"])

    def round(self, number: int) -> Round:
        for prototype in self.prototypes.values():
            prototype.begin_round(number)
        uploaded = yield self._train()
        logits = []
        for reply in uploaded:  # the server runs every received model
            prototype = self.prototypes[self._kind_of(reply.node)]
            prototype.load_weights(reply.arrays)
            logits.append(Reply(reply.node, {"logits": prototype.predict(self.public_rows)}, reply.metrics))
        y = softmax(self.mean_logits(logits))
        losses = {kind: self._fuse(kind, uploaded, y) for kind in self.prototypes}
        states = {kind: prototype.weights() for kind, prototype in self.prototypes.items()}
        back = {site: states[self._kind_of(site)] for site in names(uploaded)}
        self._holders = frozenset(names((yield Ask("train.weights", each=back, to=tuple(back)))))
        return {"loss": losses[_kind(self.config.central)], "losses": losses}

    def _train(self) -> Ask:
        """E epochs from the prototype, which only goes to sites that do not hold it already; weights come up."""
        states = {kind: prototype.weights() for kind, prototype in self.prototypes.items()}
        shapes = {kind: same_shapes(state) for kind, state in states.items()}
        each = {site: states[self._kind_of(site)] for site in self.participants if site not in self._holders}
        settings = {"epochs": self.p.local_epochs, "send_weights": True, **self.told(self.practice())}
        return Ask("train.local", {}, settings, each, check=lambda reply: shapes[self._kind_of(reply.node)](reply))

    def _fuse(self, kind: str, uploaded: list[Reply], y: np.ndarray) -> float:
        """The mean of the members by size, if any answered, then E_d epochs of KL(y || p)."""
        prototype = self.prototypes[kind]
        members = {r.node: r for r in uploaded if self._kind_of(r.node) == kind}
        if members:
            sizes = by_size({name: r.metrics["texts"] for name, r in members.items()})
            prototype.load_weights(mean_arrays({name: r.arrays for name, r in members.items()}, sizes))
        loss = prototype.distil(self.public_rows, y, "kl", self.p.distill_epochs, self.practice())
        if prototype is not self.student:
            self.student.learner.compute_seconds += prototype.learner.compute_seconds
            prototype.learner.compute_seconds = 0.0
        return loss

    def state(self) -> dict[str, np.ndarray]:
        """The prototypes beside the central model."""
        others = {kind: student for kind, student in self.prototypes.items() if student is not self.student}
        return {f"{kind}/{name}": array for kind, s in others.items() for name, array in s.learner.state().items()}

    def load_state(self, arrays: dict[str, np.ndarray]) -> None:
        """Take up what `state` gave."""
        for kind, prototype in self.prototypes.items():
            if prototype is not self.student:
                own = {n.removeprefix(f"{kind}/"): value for n, value in arrays.items() if n.startswith(f"{kind}/")}
                prototype.learner.load_state(own)


def _kind(learner: LearnerConfig) -> str:
    return Path(learner.model).name
