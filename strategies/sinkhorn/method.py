"""Bhardwaj et al., "Federated Distillation of Natural Language Understanding with Confident Sinkhorns", 2021."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedstill.common.data.tasks import Task
from fedstill.common.maths import confidence
from fedstill.common.maths.ensemble import softmax
from fedstill.common.maths.transport import SOLVERS, default_solver, positions_on_line
from fedstill.common.randomness import derive
from fedstill.common.wire import Reply
from fedstill.strategies.base import Method, Round, names
from fedstill.strategies.early import Distillation, EarlyParams
from fedstill.strategies.formulas import once
from fedstill.strategies.predictions import ask_predictions
from fedstill.strategies.sinkhorn.noise import Probe, probability_bias, probe_bias, shares_of

if TYPE_CHECKING:
    from fedstill.common.checkpoint import Nested
    from fedstill.common.models.learner import Loss
    from fedstill.server.federation import Federation

AUTHORS = {"weighting": "D", "local_epochs": 10, "pretrain_epochs": 10}


class ConfidentParams(EarlyParams):
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
    formula = staticmethod(once("noise probing"))
    p: ConfidentParams

    def prepare(self, fed: Federation) -> None:
        self.before: dict[str, np.ndarray] = {}  # the untouched central model: what it says, and its bias

    def distance(self, logits: Tensor, teachers: Tensor) -> Tensor:
        """Dist(h(x), h_k(x)) of every teacher and text, from logits (texts x C) and h_k (teachers x texts x C)."""
        raise NotImplementedError

    def round(self, fed: Federation) -> Round:
        rows, classes = fed.public_rows, fed.central.classes
        if fed.number == 1:
            self._pretrain(fed)  # phase 1 at the server
        trained = yield self.train_locally(fed)  # phase 1 at the sites
        sites = names(trained)
        biases: dict[str, np.ndarray] = {}
        if self.p.weighting == "E":  # phase 2
            probed = yield probe_bias.ask(self.probe(fed), to=sites, check=shares_of(classes))
            biases = {r.node: r.arrays["bias"] for r in probed}
            sites = tuple(biases)
        distillation = Distillation(fed, rows, self.p.distill_epochs, self.practice(fed), self.p.pipeline)

        def learn(replies: list[Reply], rows: np.ndarray) -> Loss:
            return self._loss(fed, *self._teachers(fed, replies, biases, rows))

        replies = yield from distillation.predictions(partial(ask_predictions, fed), sites, learn)  # phase 3
        h, w = self._teachers(fed, replies, biases, rows)
        who = [*names(replies), *(["central"] if self.p.without_forgetting else [])]
        means = dict(zip(who, w.mean(axis=1).tolist(), strict=True))  # over texts: what a picture of the run shows
        fed.event("weights", weighting=self.p.weighting, weights=means)
        return {"loss": distillation.finish(self._loss(fed, h, w))}  # phase 4

    def _pretrain(self, fed: Federation) -> None:
        """Train the central model on the server's labelled texts; its predictions then are kept for good."""
        central = fed.central
        if self.p.pretrain_epochs:
            if not len(central.labelled):
                raise ValueError(
                    f"{self.name} trains the central model on the server's labelled texts first, and data.labelled "
                    "is 0; give it some, or set method.pretrain_epochs = 0 for a model that comes trained"
                )
            central.fit_labelled(self.p.pretrain_epochs, self.practice(fed))
        if self.p.without_forgetting:
            self.before = {"teacher": softmax(central.predict(fed.public_rows))}
            if self.p.weighting == "E":
                asked = self.probe(fed)
                with central.learner.at("noise"):
                    self.before["bias"] = probability_bias(
                        central.learner, asked.seed, asked.count, asked.length, asked.noise
                    )

    def probe(self, fed: Federation) -> Probe:
        """The same noise for everybody."""
        return Probe(derive(fed.config.seed, "noise"), self.p.noise_texts, self.p.noise_length, self.p.noise)

    def _teachers(
        self, fed: Federation, replies: list[Reply], biases: Mapping[str, np.ndarray], rows: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """h_k(x) of the rows, and W_k(x) / sum_k W_k(x)."""
        predicted = [softmax(r.arrays["logits"]) for r in replies]
        sizes = [int(r.metrics["texts"]) for r in replies]
        centres = [biases[r.node] for r in replies] if biases else []
        if self.p.without_forgetting:
            predicted.append(self.before["teacher"][rows])
            sizes.append(len(fed.central.labelled))
            centres += [self.before["bias"]] if biases else []
        h = np.stack(predicted)
        return h, self._weights(h, sizes, centres)

    def _loss(self, fed: Federation, h: np.ndarray, w: np.ndarray) -> Loss:
        """Eq. 4, normalised as in Algorithm 1: mean over x of sum_k W_k(x) Dist(h(x), h_k(x)) / sum_k W_k(x)."""
        device = fed.central.learner.model.device
        teachers = torch.from_numpy(h).to(device)
        weights = torch.from_numpy(w.astype(h.dtype)).to(device)
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

    def state(self) -> Nested:
        """The untouched central model's answers, which no later round can make again."""
        return self.before

    def load_state(self, state: Nested) -> None:
        """Restore what `state` returned."""
        self.before = dict(state)


class Sinkhorn(ConfidentDistillation):
    """Dist is the cost of moving h(x) to h_k(x) over the labels' coordinates (section 5.1)."""

    name = "sinkhorn"
    parameters = SinkhornParams
    presets: ClassVar = {"paper": {}, "authors_code": {**AUTHORS, "support": "both", "solver": "geomloss"}}
    p: SinkhornParams

    def prepare(self, fed: Federation) -> None:
        super().prepare(fed)
        self.points = support_points(fed.central.task, self.p.support)
        self.solver = default_solver(self.points) if self.p.solver == "auto" else self.p.solver
        if self.solver == "w1_1d" and "eps" in self.p.model_fields_set:
            raise ValueError(
                "method.eps blurs the plan of Sinkhorn's iterations, and labels on a line are solved without them; "
                "take eps out, or set method.solver = 'log_sinkhorn' or 'geomloss'"
            )
        if self.solver == "w1_1d" and positions_on_line(self.points) is None:
            raise ValueError(
                f"method.solver = 'w1_1d' needs labels on one line, and with method.support = {self.p.support!r} those "
                f"of task {fed.central.task.name} are not; set method.solver = 'auto' or 'log_sinkhorn'"
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
