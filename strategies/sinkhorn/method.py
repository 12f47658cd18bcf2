"""Bhardwaj et al., "Federated Distillation of Natural Language Understanding with Confident Sinkhorns", 2021."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedstill.common.data.tasks import Task
from fedstill.common.maths import confidence
from fedstill.common.maths.ensemble import softmax
from fedstill.common.maths.transport import SOLVERS, default_solver, positions_on_line
from fedstill.common.models.learner import Rows
from fedstill.common.randomness import derive
from fedstill.common.wire import Ask, Facts, Reply, WireError, predictions
from fedstill.strategies.base import Method, Params, Round
from fedstill.strategies.sinkhorn.noise import probability_bias

AUTHORS = {"weighting": "D", "local_epochs": 10, "pretrain_epochs": 10}


class ConfidentParams(Params):
    """What both distances share.

    The paper's 100,000 noise texts take an hour where a model reads 30 a second; 2,000 come within 2.2 points of the
    same bias 19 times in 20.
    """

    weighting: Literal["A", "D", "U", "E"] = "E"
    local_epochs: int = Field(20, ge=1)
    pretrain_epochs: int = Field(20, ge=0)  # 0: the central model comes trained
    distill_epochs: int = Field(20, ge=1)
    without_forgetting: bool = True  # the untouched central model is the last teacher
    noise: Literal["vocabulary", "words"] = "vocabulary"  # each site's own tokens, or the same words everywhere
    noise_texts: int = Field(100_000, ge=1)
    noise_length: int = Field(200, ge=1)


class SinkhornParams(ConfidentParams):
    """`both` puts the one-hot vector and the coordinates side by side, as the authors' code does for sentiment."""

    support: Literal["coordinates", "one_hot", "both"] = "coordinates"
    solver: Literal["auto", "geomloss", "log_sinkhorn", "w1_1d"] = "auto"  # auto: w1_1d on a line, else log_sinkhorn
    eps: float = Field(1e-3, gt=0)


class EntropyParams(ConfidentParams):
    """KL(h_k || h), or the authors' half-sum of both directions."""

    divergence: Literal["kl", "symmetric"] = "kl"


class ConfidentDistillation(Method):
    """Sites teach, text by text as far as each is trusted; the central model as it was before is a teacher too."""

    paper = "Bhardwaj et al. 2021"
    p: ConfidentParams

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._before: dict[str, np.ndarray] = {}  # the untouched central model: what it says, and its bias

    def distance(self, logits: Tensor, teachers: Tensor) -> Tensor:
        """Dist(h(x), h_k(x)) of every teacher and text, from logits (texts x C) and h_k (teachers x texts x C)."""
        raise NotImplementedError

    def round(self, number: int) -> Round:
        rows, classes = self.public_rows, self.student.classes
        if number == 1:
            self._pretrain(rows)  # phase 1 at the server
        trained = yield self.local_training()  # phase 1 at the sites
        sites = tuple(r.node for r in trained)
        biases: dict[str, np.ndarray] = {}
        if self.p.weighting == "E":  # phase 2
            probed = yield Ask("query.bias", settings=self._noise(), to=sites, check=_shares(classes))
            biases = {r.node: r.arrays["bias"] for r in probed}
            sites = tuple(biases)
        # phase 3
        replies = yield Ask("query.predictions", {"rows": rows}, to=sites, check=predictions(rows, classes))
        # phase 4
        loss = self._loss(number, replies, biases)
        return {"loss": self.student.fit_public(rows, loss, self.p.distill_epochs, self.practice())}

    def _pretrain(self, rows: Rows) -> None:
        """The central model learns the server's labelled texts; what it then says is kept for good."""
        if self.p.pretrain_epochs:
            if not len(self.student.labelled):
                raise ValueError(
                    f"{self.name} trains the central model on the server's labelled texts first, and data.labelled "
                    "is 0; give it some, or set method.pretrain_epochs = 0 for a model that comes trained"
                )
            self.student.fit_labelled(self.p.pretrain_epochs, self.practice())
        if self.p.without_forgetting:
            self._before = {"teacher": softmax(self.student.predict(rows))}
            if self.p.weighting == "E":
                asked, learner = self._noise(), self.student.learner
                with learner.at("noise"):
                    bias = probability_bias(learner, asked["seed"], asked["count"], asked["length"], self.p.noise)
                self._before["bias"] = bias

    def _noise(self) -> Facts:
        """The seed travels, the texts never do."""
        seed = derive(self.config.seed, "noise")
        return {"seed": seed, "count": self.p.noise_texts, "length": self.p.noise_length, "noise": self.p.noise}

    def _loss(
        self, number: int, replies: list[Reply], biases: Mapping[str, np.ndarray]
    ) -> Callable[[Tensor, Rows], Tensor]:
        """Eq. 4, normalised as in Algorithm 1: mean over x of sum_k W_k(x) Dist(h(x), h_k(x)) / sum_k W_k(x)."""
        said, who = [softmax(r.arrays["logits"]) for r in replies], [r.node for r in replies]
        sizes = [int(r.metrics["texts"]) for r in replies]
        centres = [biases[r.node] for r in replies] if biases else []
        if self.p.without_forgetting:
            said.append(self._before["teacher"])
            who.append("central")
            sizes.append(len(self.student.labelled))
            centres += [self._before["bias"]] if biases else []
        h = np.stack(said)
        device = self.student.learner.model.device
        teachers = torch.from_numpy(h).to(device)
        w = self._weights(h, sizes, centres)
        means = dict(zip(who, w.mean(axis=1).tolist(), strict=True))  # over texts: what a picture of the run shows
        self.record.event("weights", round=number, weighting=self.p.weighting, weights=means)
        weights = torch.from_numpy(w.astype(np.float32)).to(device)
        return lambda logits, places: (
            (weights[:, places] * self.distance(logits, teachers[:, places])).sum(dim=0).mean()
        )

    def _weights(self, teachers: np.ndarray, sizes: list[int], biases: list[np.ndarray]) -> np.ndarray:
        """W_k(x) / sum_k W_k(x), teachers x texts."""
        if self.p.weighting == "A":
            return confidence.equal(teachers)
        if self.p.weighting == "D":
            return confidence.by_texts(teachers, np.array(sizes))
        if self.p.weighting == "U":
            return confidence.from_uniform(teachers)
        return confidence.from_bias(teachers, np.stack(biases))

    def state(self) -> dict[str, np.ndarray]:
        """The untouched central model's answers, which no later round can make again."""
        return self._before

    def load_state(self, arrays: dict[str, np.ndarray]) -> None:
        """Take up what `state` gave."""
        self._before = dict(arrays)


class Sinkhorn(ConfidentDistillation):
    """Dist is the cost of moving h(x) to h_k(x) over the labels' coordinates (section 5.1)."""

    name = "sinkhorn"
    parameters = SinkhornParams
    presets: ClassVar = {"paper": {}, "authors_code": {**AUTHORS, "support": "both", "solver": "geomloss"}}
    p: SinkhornParams

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.points = support_points(self.student.task, self.p.support)
        self.solver = default_solver(self.points) if self.p.solver == "auto" else self.p.solver
        if self.solver == "w1_1d" and positions_on_line(self.points) is None:
            raise ValueError(
                f"method.solver = 'w1_1d' needs labels on one line, and with method.support = {self.p.support!r} those "
                f"of task {self.student.task.name} are not; set method.solver = 'auto' or 'log_sinkhorn'"
            )

    def distance(self, logits: Tensor, teachers: Tensor) -> Tensor:
        mu = logits.softmax(dim=-1).expand_as(teachers)
        return SOLVERS[self.solver](mu, teachers, self.points, self.p.eps)


class Entropy(ConfidentDistillation):
    """Dist is a divergence that knows no labels' nearness: the paper's baseline."""

    name = "entropy"
    parameters = EntropyParams
    presets: ClassVar = {"paper": {}, "authors_code": {**AUTHORS, "divergence": "symmetric"}}
    p: EntropyParams

    def distance(self, logits: Tensor, teachers: Tensor) -> Tensor:
        divergence = confidence.kl if self.p.divergence == "kl" else confidence.symmetric_kl
        return divergence(logits, teachers)


def support_points(task: Task, support: str) -> Tensor:
    """The labels' points: the task's coordinates, corners that are all equally far apart, or both joined."""
    one_hot = torch.eye(len(task.labels), dtype=torch.float64)
    if support == "one_hot":
        return one_hot
    if not task.coordinates:
        raise ValueError(
            f"task {task.name} does not say where its labels {list(task.labels)} lie; set task.coordinates, such as "
            f"{[[float(i + 1)] for i in range(len(task.labels))]} for ordered labels, or method.support = 'one_hot'"
        )
    points = torch.tensor(task.coordinates, dtype=torch.float64)
    return points if support == "coordinates" else torch.cat([one_hot, points], dim=-1)


def _shares(classes: int) -> Callable[[Reply], None]:
    def check(reply: Reply) -> None:
        bias = reply.arrays.get("bias")
        if bias is None or bias.shape != (classes,) or bias.min() < 0 or abs(float(bias.sum()) - 1) > 1e-3:
            raise WireError(f"a probability bias must be {classes} shares that sum to 1, got {bias}")

    return check
