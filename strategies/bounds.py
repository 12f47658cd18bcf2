"""The two bounds of every comparison (as FedID and AdaFD have them): each site alone, and all texts in one place."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from fedstill.strategies.base import FRESH_EACH_CALL, Method, Round, mean_loss

if TYPE_CHECKING:
    from fedstill.server.federation import Federation

PRESETS = {"paper": {}, "authors_code": FRESH_EACH_CALL}


class Isolated(Method):
    """Each site trains E epochs a round and nothing is exchanged; the central model stays as it began."""

    name = "isolated"
    paper = "lower bound"
    presets: ClassVar = PRESETS
    own_tasks = "possible"
    teaches_central = False

    def round(self, fed: Federation) -> Round:
        return {"loss": mean_loss((yield self.train_locally(fed)))}


class Centralized(Method):
    """The central model trains E epochs a round on everybody's private texts; the sites do nothing."""

    name = "centralized"
    paper = "upper bound"
    presets: ClassVar = PRESETS

    def round(self, fed: Federation) -> Round:
        if not len(fed.central.private):
            raise ValueError(
                "centralized trains on all private texts in one place, and here they are with the sites "
                "(data.private = 0); run it on a task whose texts the run deals out, or choose another method"
            )
        yield from ()  # nobody is asked
        return {"loss": fed.central.fit_private(self.p.local_epochs, self.practice(fed))}
