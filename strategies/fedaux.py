"""FedAUX. Sattler et al., "FedAUX: Leveraging Unlabeled Auxiliary Data in Federated Learning", IEEE TNNLS 2021."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from fedstill.common.maths.certainty import certain_mean
from fedstill.common.maths.ensemble import by_size, mean_arrays, softmax, uniform
from fedstill.common.randomness import derive
from fedstill.common.wire import Ask, Reply, WireError, items, same_shapes
from fedstill.strategies.base import Method, Params, Round
from fedstill.strategies.predictions import names


class FedAUXParams(Params):
    """The public texts are the auxiliary ones: a share `negatives` of them stands for texts that are nobody's."""

    distill_epochs: int = Field(1, ge=1)
    extractor: str = "minilm"  # the pretrained model whose features are compared
    negatives: float = Field(0.2, gt=0, lt=1)
    regulariser: float = Field(0.01, gt=0)
    per_text: bool = True  # the regulariser stands beside the mean loss of a text, not beside the sum
    epsilon: float | None = Field(None, gt=0)  # noise for (epsilon, delta)-differential privacy; none: no noise
    delta: float = Field(1e-5, gt=0, lt=1)
    weights: Literal["size", "uniform"] = "size"  # of the parameters' mean


class FedAUX(Method):
    """FedAvg, then the mean is taught by the ensemble, each site counting where texts look like its own."""

    name = "fedaux"
    paper = "Sattler et al. 2021"
    parameters = FedAUXParams
    presets: ClassVar = {
        "paper": {"epsilon": 0.1, "local_epochs": 1},
        "authors_code": {"epsilon": 0.1, "local_epochs": 1, "per_text": False, "weights": "uniform"},
        "feddrs": {"local_epochs": 5, "participation": 0.8},
    }
    needs_same_models = True
    p: FedAUXParams

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        order = np.random.default_rng(derive(self.config.seed, "auxiliary")).permutation(len(self.student.public))
        cut = round(self.p.negatives * len(order))
        if not 0 < cut < len(order):
            raise ValueError(
                f"fedaux needs auxiliary texts to distil on and others as negatives; data.public gives {len(order)}, "
                f"with method.negatives = {self.p.negatives}; raise data.public"
            )
        self.negatives, self.rows = np.sort(order[:cut]), np.sort(order[cut:])
        self._scores: dict[str, np.ndarray] = {}

    def round(self, number: int) -> Round:
        if unscored := tuple(name for name in self.participants if name not in self._scores):
            scored = yield self._ask_scores(unscored)  # once a site
            self._scores.update({r.node: r.arrays["scores"] for r in scored})
        theta, known = self.student.weights(), tuple(name for name in self.participants if name in self._scores)
        settings = {"epochs": self.p.local_epochs, "send_weights": True, **self.told(self.practice())}
        replies = yield Ask("train.local", theta, settings, to=known, check=same_shapes(theta))
        z = np.stack([self._predict(reply) for reply in replies])
        y = softmax(certain_mean(z, np.stack([self._scores[name] for name in names(replies)])))
        sizes = {r.node: int(r.metrics["texts"]) for r in replies}
        weights = by_size(sizes) if self.p.weights == "size" else uniform(names(replies))
        self.student.load_weights(mean_arrays({r.node: r.arrays for r in replies}, weights))
        return {"loss": self.student.distil(self.rows, y, "kl", self.p.distill_epochs, self.practice())}

    def _ask_scores(self, sites: tuple[str, ...]) -> Ask:
        told = ("extractor", "regulariser", "per_text", "epsilon", "delta")
        settings = {name: getattr(self.p, name) for name in told}
        arrays = {"rows": self.rows, "negatives": self.negatives}
        return Ask("query.scores", arrays, settings, to=sites, check=_scores(self.rows))

    def _predict(self, reply: Reply) -> np.ndarray:
        """The server runs every received model."""
        self.student.load_weights(reply.arrays)
        return self.student.predict(self.rows)

    def state(self) -> dict[str, np.ndarray]:
        """The scores, which are sent once."""
        return dict(self._scores)

    def load_state(self, arrays: dict[str, np.ndarray]) -> None:
        """Take up what `state` gave."""
        self._scores = dict(arrays)


def _scores(rows: np.ndarray) -> Callable[[Reply], None]:
    def check(reply: Reply) -> None:
        found, said = reply.arrays.get("scores"), reply.arrays.get("items")
        if found is None or said is None or not np.array_equal(said, items(rows)) or found.shape != rows.shape:
            raise WireError("scores for other texts than asked")
        if not 0 < found.min() <= found.max() <= 1 + 1e-6:
            raise WireError(f"scores from {found.min()} to {found.max()}; they must be above 0 and at most 1")

    return check
