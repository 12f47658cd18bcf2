"""FedAUX. Sattler et al., "FedAUX: Leveraging Unlabeled Auxiliary Data in Federated Learning", IEEE TNNLS 2021."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from pydantic import Field

from fedstill.common.config import ModelConfig
from fedstill.common.maths import certainty
from fedstill.common.maths.ensemble import by_size, mean_arrays, softmax, uniform
from fedstill.common.models.features import text_features
from fedstill.common.models.loading import load_model
from fedstill.common.randomness import derive
from fedstill.common.wire import Ask, Reply, WireError, items
from fedstill.common.wire.checks import same_shapes
from fedstill.common.wire.typed import Message
from fedstill.strategies.base import BALANCED, BalancedMethod, BalancedParams, Round, names, texts_of
from fedstill.strategies.parameters import TrainShared, train_shared
from fedstill.strategies.verbs import Shield, site_verb

if TYPE_CHECKING:
    from fedstill.client.node import Node
    from fedstill.common.checkpoint import Nested
    from fedstill.server.federation import Federation

MODEL = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


class FedAUXParams(BalancedParams):
    """The public texts are the auxiliary ones: a share `negatives` of them stands for texts that are nobody's."""

    distill_epochs: int = Field(1, ge=1)
    extractor: str = "minilm"  # the pretrained model whose features are compared
    negatives: float = Field(0.2, gt=0, lt=1)
    regulariser: float = Field(0.01, gt=0)
    per_text: bool = True  # the regulariser stands beside the mean loss of a text, not beside the sum
    epsilon: float | None = Field(None, gt=0, le=1)  # noise at sites without [privacy]; none: no noise
    delta: float = Field(1e-5, gt=0, lt=1)
    weights: Literal["size", "uniform"] = "size"  # of the parameters' mean


@dataclass(frozen=True)
class Score(Message):
    """Which public rows to score, which stand for texts that are nobody's, and how the regression is fitted."""

    rows: np.ndarray
    negatives: np.ndarray
    extractor: str
    regulariser: float
    per_text: bool
    epsilon: float | None
    delta: float


@dataclass(frozen=True)
class Scored(Message):
    """s_k(x) of the rows."""

    items: np.ndarray
    scores: np.ndarray
    texts: int


class FedAUX(BalancedMethod):
    """FedAvg, then the mean is taught by the ensemble, each site counting where texts look like its own."""

    name = "fedaux"
    paper = "Sattler et al. 2021"
    parameters = FedAUXParams
    presets: ClassVar = {
        "paper": {"epsilon": 0.1, "local_epochs": 1},
        "authors_code": {"epsilon": 0.1, "local_epochs": 1, "per_text": False, "weights": "uniform"},
        "feddrs": BALANCED,
    }
    needs_same_models = True
    p: FedAUXParams

    def prepare(self, fed: Federation) -> None:
        order = np.random.default_rng(derive(fed.config.seed, "auxiliary")).permutation(len(fed.central.public))
        cut = round(self.p.negatives * len(order))
        if not 0 < cut < len(order):
            raise ValueError(
                f"fedaux needs auxiliary texts to distil on and others as negatives; data.public gives {len(order)}, "
                f"with method.negatives = {self.p.negatives}; raise data.public"
            )
        self.negatives, self.rows = np.sort(order[:cut]), np.sort(order[cut:])
        self.scores: dict[str, np.ndarray] = {}

    def round(self, fed: Federation) -> Round:
        central = fed.central
        if unscored := tuple(name for name in fed.participants if name not in self.scores):
            scored = yield self.ask_scores(unscored)  # once a site
            self.scores.update({r.node: r.arrays["scores"] for r in scored})
        theta, known = central.weights(), tuple(name for name in fed.participants if name in self.scores)
        task = TrainShared(self.p.local_epochs, self.practice(fed), most=self.most_texts(fed), weights=theta)
        replies = yield train_shared.ask(task, to=known, check=same_shapes(theta))
        z = np.stack([self.predict(fed, reply) for reply in replies])
        y = softmax(certainty.certain_mean(z, np.stack([self.scores[name] for name in names(replies)])))
        weights = by_size(texts_of(replies)) if self.p.weights == "size" else uniform(names(replies))
        central.load_weights(mean_arrays({r.node: r.arrays for r in replies}, weights))
        return {"loss": central.distil(self.rows, y, "kl", self.p.distill_epochs, self.practice(fed))}

    def ask_scores(self, sites: tuple[str, ...]) -> Ask:
        """Return the Ask for how much each auxiliary text resembles a site's own."""
        p = self.p
        message = Score(self.rows, self.negatives, p.extractor, p.regulariser, p.per_text, p.epsilon, p.delta)
        return score.ask(message, to=sites, check=_scores(self.rows))

    def predict(self, fed: Federation, reply: Reply) -> np.ndarray:
        """Let the server run every received model."""
        fed.central.load_weights(reply.arrays)
        return fed.central.predict(self.rows)

    def state(self) -> Nested:
        """Return the scores, which are sent once."""
        return self.scores

    def load_state(self, state: Nested) -> None:
        """Restore what `state` returned."""
        self.scores = dict(state)


def _scores(rows: np.ndarray) -> Callable[[Reply], None]:
    def check(reply: Reply) -> None:
        scores, sent = reply.arrays.get("scores"), reply.arrays.get("items")
        if scores is None or sent is None or not np.array_equal(sent, items(rows)) or scores.shape != rows.shape:
            raise WireError("scores for other texts than asked")
        if not 0 < scores.min() <= scores.max() <= 1 + 1e-6:
            raise WireError(f"scores from {scores.min()} to {scores.max()}; they must be above 0 and at most 1")

    return check


# --- the site's half ---


SCORED = Shield(("items", "texts"), charged=("scores",))


@site_verb("query.scores", leaves="predictions", phase="scoring", shield=SCORED)
def score(site: Node, asked: Score) -> Scored:
    """s_k(x) of the public rows, by a regression of the private texts against other public ones.

    A site with [privacy] adds its own noise and pays for it, whatever epsilon was asked.
    """
    rows, others = site.public_rows(asked.rows), site.public_rows(asked.negatives)
    if not len(others) or not len(site.private):
        raise WireError("scores need private texts and negatives")
    if not MODEL.fullmatch(asked.extractor):
        raise WireError(f"extractor {asked.extractor[:80]!r}: the server may name a model, not a folder of this site")
    length, keep = site.config.train.max_length, site.config.train.keep
    settings = ModelConfig(name=asked.extractor, max_length=length, keep=keep, device=site.site.device)
    extractor = load_model(settings, site.task, seed=0)
    public = text_features(extractor, site.texts.public.texts)
    own = text_features(extractor, site.texts.private.texts)
    if site.guard is None and asked.epsilon is None:
        regression = certainty.fit(own, public[others], asked.regulariser, asked.per_text)
        return Scored(items(rows), certainty.scores(regression, public[rows]), len(site.private))
    if not 1e-6 <= asked.regulariser <= 1e6:
        raise WireError(f"a regulariser of {asked.regulariser} bounds nothing; it must lie between 1e-6 and 1e6")
    regression = certainty.fit_bounded(own, public[others], asked.regulariser, asked.per_text)
    moved = certainty.sensitivity(len(own) + len(others), asked.regulariser, asked.per_text)
    if site.guard is not None:
        deviation = moved * site.guard.charge(1, "its scores")
    else:
        assert asked.epsilon is not None
        deviation = moved * certainty.gaussian_deviation(asked.epsilon, asked.delta)
    regression = certainty.with_noise(regression, deviation, site.draw_noise)
    return Scored(items(rows), certainty.scores(regression, public[rows]), len(site.private))
