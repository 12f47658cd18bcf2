"""The two bounds of every comparison (as FedID and AdaFD have them): each site alone, and all texts in one place."""

from __future__ import annotations

from typing import ClassVar

from fedstill.strategies.base import Method, Params, Round
from fedstill.strategies.predictions import mean_loss

PRESETS = {"paper": {}, "authors_code": {"optimizer_state": "fresh", "schedule": "call"}}


class Isolated(Method):
    """Each site trains E epochs a round and nothing is exchanged; the central model stays as it began."""

    name = "isolated"
    paper = "lower bound"
    presets: ClassVar = PRESETS
    any_task = True
    p: Params

    def round(self, number: int) -> Round:
        replies = yield self.local_training()
        return {"loss": mean_loss(replies)}


class Centralized(Method):
    """The central model trains E epochs a round on everybody's private texts; the sites do nothing."""

    name = "centralized"
    paper = "upper bound"
    presets: ClassVar = PRESETS
    p: Params

    def round(self, number: int) -> Round:
        if not len(self.student.private):
            raise ValueError(
                "centralized trains on all private texts in one place, and here they are with the sites "
                "(data.private = 0); run it on a task whose texts the run deals out, or choose another method"
            )
        yield from ()  # nobody is asked
        return {"loss": self.student.fit_private(self.p.local_epochs, self.practice())}
