"""What methods share that exchange predictions on the whole public set once a round: both halves."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import one_hot

from fedstill.common.maths.ensemble import Matrix, by_size, mean_predictions, softmax, uniform
from fedstill.common.maths.losses import LOSSES, soft_cross_entropy
from fedstill.common.maths.robust import Aggregation, combine
from fedstill.common.practice import Practice
from fedstill.common.wire import Ask, Reply, WireError, items
from fedstill.common.wire.checks import predictions
from fedstill.common.wire.typed import Message
from fedstill.strategies.base import Method, Params, names, texts_of
from fedstill.strategies.early import Distillation, EarlyParams
from fedstill.strategies.verbs import NOTHING, Shield, site_verb

if TYPE_CHECKING:
    from fedstill.client.node import Node
    from fedstill.common.models.learner import Rows
    from fedstill.server.federation import Federation


# --- what the halves say to each other ---


@dataclass(frozen=True)
class Predict(Message):
    """Which public rows; their texts are at the site."""

    rows: np.ndarray
    dropout: bool = False


@dataclass(frozen=True)
class Predictions(Message):
    """Logits of the rows that `items` stands for, and how many private texts the site has."""

    items: np.ndarray
    logits: np.ndarray
    texts: int


@dataclass(frozen=True)
class Distil(Message):
    """E_d epochs towards targets on public rows; `private`: shuffled among the private texts (Cronus)."""

    rows: np.ndarray
    targets: np.ndarray
    loss: Literal["soft", "hard", "kl", "mse", "l1"]
    epochs: int
    practice: Practice = Practice()
    temperature: float = 1.0
    private: bool = False


@dataclass(frozen=True)
class Distilled(Message):
    """The last epoch's mean loss."""

    loss: float | None = None
    texts: int | None = None


# --- the server's half ---


class PredictingParams(Params):
    """What the server makes of predictions."""

    distill_epochs: int = Field(3, ge=1)
    weights: Literal["size", "uniform"] = "size"


class EnsembleParams(PredictingParams):
    """Rules beside `mean` count every site once and do not look at `weights`."""

    aggregation: Aggregation = "mean"


class TaughtParams(PredictingParams):
    """FedID's figure 3: other methods add the server's labelled texts to the training of the central model."""

    labelled_epochs: int = Field(0, ge=0)  # of CE on the server's labelled texts, after each distillation


class PredictingMethod(Method):
    """The steps between local training and distillation."""

    p: PredictingParams

    def site_weights(self, replies: list[Reply]) -> dict[str, float]:
        """w_k over the sites that answered."""
        return uniform(names(replies)) if self.p.weights == "uniform" else by_size(texts_of(replies))

    def votes(self, replies: list[Reply]) -> Matrix:
        """sum_k w_k onehot(argmax z_k): soft CE against it is sum_k w_k CE(argmax z_k, f)."""
        votes = {site: one_hot_votes(logits) for site, logits in logits_of(replies).items()}
        return mean_predictions(votes, self.site_weights(replies))

    def distillation(self, fed: Federation, rows: np.ndarray, pipeline: int) -> Distillation:
        """E_d epochs of the central model on what sites predict."""
        return Distillation(fed, rows, self.p.distill_epochs, self.practice(fed), pipeline)

    def distil_at_sites(
        self, fed: Federation, rows: np.ndarray, targets: Matrix, loss: str, sites: tuple[str, ...]
    ) -> Ask:
        """E_d epochs at each of the sites."""
        practice = replace(self.practice(fed), dropout=self.p.distill_dropout)
        return distil.ask(Distil(rows, targets, loss, self.p.distill_epochs, practice), to=sites)  # type: ignore[arg-type]


class EnsembleMethod(PredictingMethod):
    """Combines what the sites say into one prediction."""

    p: EnsembleParams

    def averages_predictions(self) -> bool:
        return self.p.aggregation == "mean"

    def mean_logits(self, replies: list[Reply]) -> Matrix:
        """z = sum_k w_k z_k, or the rule that stands for the mean."""
        return combine(logits_of(replies), self.site_weights(replies), self.p.aggregation)

    def mean_probabilities(self, replies: list[Reply]) -> Matrix:
        """y = sum_k w_k softmax(z_k), or the rule that stands for the mean."""
        probabilities = {site: softmax(logits) for site, logits in logits_of(replies).items()}
        return combine(probabilities, self.site_weights(replies), self.p.aggregation, probabilities=True)


class TaughtMethod(PredictingMethod):
    """Its central model may also learn the server's labelled texts."""

    p: TaughtParams

    def prepare(self, fed: Federation) -> None:
        if self.p.labelled_epochs and not len(fed.central.labelled):
            raise ValueError(
                "method.labelled_epochs trains on the server's labelled texts, and data.labelled is 0; give it some, "
                "or take labelled_epochs out"
            )

    def learn_labelled(self, fed: Federation) -> None:
        """Some epochs of CE of the central model, if asked."""
        if self.p.labelled_epochs:
            fed.central.fit_labelled(self.p.labelled_epochs, self.practice(fed))


class WarmedParams(EnsembleParams, EarlyParams):
    """Sites count alike, and have trained on their own before the first exchange."""

    weights: Literal["size", "uniform"] = "uniform"
    warmup_epochs: int = Field(3, ge=1)  # on the private texts, once


class WarmedMethod(EnsembleMethod):
    """Begins with some epochs at every site."""

    p: WarmedParams

    def warm_up(self, fed: Federation) -> Generator[Ask, list[Reply], tuple[str, ...]]:
        """In the first round, for those too that are drawn for later rounds only; the round's sites that are ready."""
        if fed.number > 1:
            return fed.participants
        warmed = yield self.train_locally(fed, to=tuple(fed.sites), epochs=self.p.warmup_epochs)
        return tuple(name for name in names(warmed) if name in fed.participants)


def ask_predictions(fed: Federation, rows: np.ndarray, sites: tuple[str, ...] | None = None) -> Ask:
    """Ask for logits of the public rows, from those sites or from all participants."""
    return predict.ask(Predict(rows), to=sites, check=predictions(rows, fed.central.classes))


def one_hot_votes(logits: Matrix) -> Matrix:
    """1 for the class that each text scores highest, 0 elsewhere."""
    corners: Matrix = np.eye(logits.shape[-1], dtype=logits.dtype)
    return np.asarray(corners[logits.argmax(axis=-1)])


def logits_of(replies: list[Reply]) -> dict[str, Matrix]:
    """z_k of every site that answered."""
    return {reply.node: reply.arrays["logits"] for reply in replies}


# --- the site's half ---


@dataclass
class Pending:
    """A predicted batch that waits for feedback: its rows, where in the run, and its graph if still in memory."""

    rows: np.ndarray
    place: tuple[int, int]
    dropout: bool
    logits: Tensor | None = None


PREDICTED = Shield(("items", "texts"), noised=("logits",))


@site_verb("query.predictions", leaves="predictions", phase="prediction", shield=PREDICTED)
def predict(site: Node, asked: Predict) -> Predictions:
    """Logits on public rows (FedID eq. 5)."""
    rows = site.public_rows(asked.rows)
    return Predictions(items(rows), site.learner.predict(site.public, rows, asked.dropout), len(site.private))


@site_verb("train.distil", leaves=NOTHING, phase="distillation", shield=Shield(("texts",)))
def distil(site: Node, lesson: Distil) -> Distilled:
    """E_d epochs towards the given targets on public rows (FedID eq. 8), among the private texts if asked (Cronus)."""
    rows = site.public_rows(lesson.rows)
    targets = site.targets(lesson.targets, len(rows))
    if lesson.private:
        if site.guard is not None and site.guard.trains:
            raise WireError(
                "this site trains by DP-SGD, on its private texts alone; Cronus mixes them with public ones"
            )
        losses = _train_on_both(site, rows, targets, lesson)
        return Distilled(losses[-1], len(site.private))
    loss = LOSSES[lesson.loss]
    losses = site.learner.fit(
        site.public,
        rows,
        lambda logits, places: loss(logits / lesson.temperature, targets[places]),
        lesson.epochs,
        "distil",
        lesson.practice,
    )
    return Distilled(losses[-1])


def _train_on_both(site: Node, rows: Rows, targets: Tensor, lesson: Distil) -> list[float]:
    """Soft CE on private and public texts shuffled together; a private text's target is its label."""
    wanted = torch.cat([one_hot(site.labels, len(site.task.labels)).to(targets), targets])
    return site.learner.fit(
        site.private.followed_by(site.public),
        np.concatenate([np.arange(len(site.private)), len(site.private) + rows]),
        lambda logits, places: soft_cross_entropy(logits, wanted[places]),
        lesson.epochs,
        "local",
        lesson.practice,
    )
