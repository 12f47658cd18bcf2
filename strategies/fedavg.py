"""FedAvg. McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017."""

from __future__ import annotations

from typing import ClassVar

from fedstill.common.maths.ensemble import by_size, mean_arrays
from fedstill.common.wire import Ask, same_shapes
from fedstill.strategies.base import Method, Params, Round


class FedAvg(Method):
    """Weights go down, E local epochs, weights come up, and their mean by size is the central model."""

    name = "fedavg"
    paper = "McMahan et al. 2017"
    presets: ClassVar = {
        "paper": {"optimizer_state": "fresh"},
        "authors_code": {"optimizer_state": "fresh", "schedule": "call"},
    }
    needs_same_models = True
    any_task = True
    p: Params

    def round(self, number: int) -> Round:
        theta = self.student.weights()
        settings = {"epochs": self.p.local_epochs, "send_weights": True, **self.told(self.practice())}
        replies = yield Ask("train.local", theta, settings, check=same_shapes(theta))
        weights = by_size({r.node: r.metrics["texts"] for r in replies})
        self.student.load_weights(mean_arrays({r.node: r.arrays for r in replies}, weights))  # FedID eq. 3
        return {"loss": sum(weights[r.node] * r.metrics["loss"] for r in replies)}
