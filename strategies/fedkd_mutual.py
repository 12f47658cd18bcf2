"""FedKD. Wu et al., "Communication-efficient federated learning via knowledge distillation", Nat. Commun. 2022."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Literal

from pydantic import Field

from fedstill.common.maths.ensemble import by_size, mean_arrays, uniform
from fedstill.common.maths.svd import compress, energy_share, misfits, recompose
from fedstill.common.wire import Arrays, Ask, Reply, WireError
from fedstill.strategies.base import Method, Params, Round
from fedstill.strategies.predictions import names


class FedKDMutualParams(Params):
    """tau(t) goes from `energy_start` to `energy_end` over the rounds; `joint`: one loss, nothing taken as given."""

    svd: bool = True
    energy_start: float = Field(0.95, gt=0, le=1)
    energy_end: float = Field(0.98, gt=0, le=1)
    joint: bool = False
    weights: Literal["size", "uniform"] = "uniform"
    freeze_embeddings: bool = False


class FedKDMutual(Method):
    """A site's own model and a shared one teach each other; the shared one's changes travel, as thin factors."""

    name = "fedkd-mutual"
    paper = "Wu et al. 2022"
    parameters = FedKDMutualParams
    presets: ClassVar = {
        "paper": {},
        "authors_code": {"joint": True, "freeze_embeddings": True},
        "feddrs": {"svd": False, "local_epochs": 5, "participation": 0.8},
    }
    p: FedKDMutualParams

    def round(self, number: int) -> Round:
        shared = self.student.weights()
        tau = energy_share(number / self.config.rounds, self.p.energy_start, self.p.energy_end) if self.p.svd else None
        settings = {"epochs": self.p.local_epochs, "share": tau, **self.told(self.practice())}
        settings |= {"joint": self.p.joint, "frozen": self.p.freeze_embeddings}
        each = {site: shared for site in self.participants if site not in self._holders}
        replies = yield Ask("train.mutual", {}, settings, each, check=_recomposes(shared))
        sizes = {r.node: int(r.metrics["texts"]) for r in replies}
        weights = by_size(sizes) if self.p.weights == "size" else uniform(names(replies))
        mean = mean_arrays({r.node: recompose(r.arrays, shared) for r in replies}, weights)
        down = compress(mean, tau) if tau else mean
        change = recompose(down, shared)  # what the sites get, not what was sent up: all hold the same model
        self.student.load_weights({name: value + change[name] for name, value in shared.items()})
        told = yield Ask("train.change", down, to=names(replies))
        self._holders = frozenset(names(told))
        hidden = all(bool(r.metrics.get("hidden")) for r in replies)
        return {"loss": sum(weights[r.node] * r.metrics["loss"] for r in replies), "share": tau, "hidden": hidden}


def _recomposes(like: Arrays) -> Callable[[Reply], None]:
    def check(reply: Reply) -> None:
        wrong = misfits(reply.arrays, like)
        if wrong:
            raise WireError(f"{len(wrong)} arrays do not fit the central model: " + "; ".join(wrong[:8]))

    return check
