"""Ma et al., "FedID: Federated Interactive Distillation for Large-Scale Pretraining Language Models", EMNLP 2023."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import numpy as np
import torch
from pydantic import ConfigDict, Field, model_validator

from fedstill.common.maths.ensemble import Matrix, by_size, softmax
from fedstill.common.maths.feedback import Jacobian, exact_surrogate, scalar_surrogate, through_softmax
from fedstill.common.maths.losses import LOSSES
from fedstill.common.maths.robust import Aggregation, combine
from fedstill.common.practice import Practice
from fedstill.common.wire import Ask, Reply, items
from fedstill.common.wire.checks import predictions
from fedstill.common.wire.typed import Message, named
from fedstill.strategies.base import FRESH, Method, Params, Round, names, texts_of
from fedstill.strategies.formulas import batch_by_batch
from fedstill.strategies.predictions import PREDICTED, Pending, Predict, Predictions, logits_of, one_hot_votes
from fedstill.strategies.secure_sum import summed
from fedstill.strategies.verbs import site_verb

if TYPE_CHECKING:
    from fedstill.client.node import Node
    from fedstill.server.federation import Federation

NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class FedIDParams(Params):
    """Eqs. 10 to 15. `votes` (authors' code) has the server learn the sites' weighted hard votes instead of eq. 11."""

    model_config = ConfigDict(populate_by_name=True)

    distill_epochs: int = Field(3, ge=1)
    feedback: Literal["none", "scalar", "scalar_eval", "exact"] = "scalar"
    lambda_: NotNegative | Literal["1/eta"] = Field(1.0, alias="lambda")  # 1/eta: as if eta, in h and G, were 1
    aggregation: Aggregation = "mean"  # rules beside `mean` count every site once
    jacobian: Jacobian = "auto"  # of `exact`: by forward mode, or by two more forward passes
    server_optimizer: Literal["adamw", "sgd"] = "adamw"
    distil: bool = True  # off: the ablation without g_distill
    average: Literal["probabilities", "logits"] = "probabilities"
    target: Literal["soft", "votes"] = "soft"
    dropout: bool = False  # predict and validate in train mode, as the authors' code does
    batch_size: int | None = Field(None, ge=1)  # public texts an exchange; by default the central model's batch
    pipeline: Literal[0, 1] = 0  # 1: sites predict a batch while the central model learns the one before

    @model_validator(mode="after")
    def _goes_together(self) -> FedIDParams:
        if self.feedback == "exact" and self.server_optimizer == "adamw" and self.optimizer_state == "fresh":
            raise ValueError(
                "feedback = 'exact' has no useful derivative through the first step of a fresh AdamW, which is all but "
                "a sign; set optimizer_state = 'persistent', or server_optimizer = 'sgd' with a larger distill_rate"
            )
        if self.feedback != "none" and self.server_optimizer != "sgd" and self.lambda_ == "1/eta":
            raise ValueError(
                "lambda = '1/eta' is for plain gradient steps: AdamW's are long whatever the gradient, and feedback "
                "would drown distillation (57 times it, if exact); leave lambda at 1, or set server_optimizer = 'sgd'"
            )
        if self.feedback == "exact" and self.aggregation != "mean":
            raise ValueError("feedback = 'exact' is the derivative by a weighted mean; set aggregation = 'mean'")
        if self.distill_dropout:
            raise ValueError("fedid's sites learn from the very prediction that they sent; set dropout instead")
        if self.feedback == "none" and not self.distil:
            raise ValueError("feedback = 'none' with distil = false leaves the sites nothing to learn; change one")
        return self


@dataclass(frozen=True)
class Lesson(Message):
    """Lines 19 to 21 for one batch, and the rows of the next one: a single exchange a batch."""

    answered: np.ndarray  # which rows this is about
    ensemble: np.ndarray  # y
    distil: bool
    loss: Literal["soft", "hard"]
    feedback: Literal["none", "scalar", "exact"]
    weight: float = 0.0  # w_k
    h: float = 0.0  # L_val before the central step minus after it
    strength: float = named("lambda", default=1.0)
    matrix: np.ndarray | None = named("feedback", default=None)  # G
    matrix_of: Literal["probabilities", "logits"] = "probabilities"
    practice: Practice = Practice()
    rows: np.ndarray | None = None  # of the next batch; none after the last
    dropout: bool = False
    late: bool = False  # feedback on the last batch but one: the last one is still with the central model


@dataclass(frozen=True)
class Learned(Message):
    """Predictions of the next batch; after the last one, the loss of its step."""

    texts: int
    loss: float | None = None
    items: np.ndarray | None = None
    logits: np.ndarray | None = None


class FedID(Method):
    """After local training, one exchange a public mini-batch: predictions up, ensemble and feedback down."""

    name = "fedid"
    paper = "Ma et al. 2023"
    parameters = FedIDParams
    presets: ClassVar = {
        "paper": {},
        "authors_code": {"average": "logits", "target": "votes", "dropout": True, **FRESH},
    }
    formula = staticmethod(batch_by_batch)
    p: FedIDParams

    def prepare(self, fed: Federation) -> None:
        if self.p.feedback == "exact" and fed.config.train.clip is not None:
            raise ValueError("feedback = 'exact' goes through the whole step, and train.clip cuts it; take one out")
        if self.p.feedback == "exact" and fed.config.central.compile:
            raise ValueError("feedback = 'exact' differentiates a step, which torch.compile cannot; take compile out")
        if self.p.feedback != "none" and not len(fed.central.labelled):
            raise ValueError("for feedback data.labelled is 0; give it some, or set method.feedback = 'none'")

    def averages_predictions(self) -> bool:
        return self.p.aggregation == "mean"

    def why_no_sums(self) -> str | None:
        if self.p.pipeline:
            return "with pipeline = 1 overlaps its Asks, and a secure sum takes several"
        if self.p.aggregation != "mean":
            return "with a robust aggregation compares the sites' answers"
        return None if self.p.target == "soft" else "with target = 'votes' takes each site's hard vote"

    def round(self, fed: Federation) -> Round:  # Algorithm 1
        sites = names((yield self.train_locally(fed)))  # lines 6-8, eq. 4
        batches, loss = self.batches(fed), 0.0
        if self.p.pipeline:
            from fedstill.strategies.fedid_overlapped import overlapped  # it uses the verbs below

            return (yield from overlapped(self, fed, sites, batches))
        of: Literal["values", "probabilities"] = "values" if self.p.average == "logits" else "probabilities"
        y_k = yield summed(self.ask_batch(fed, batches[0], sites), of)  # 10-13, eq. 9
        for i, (x0, following) in enumerate(zip(batches, [*batches[1:], None], strict=True)):  # 9
            w = by_size(texts_of(y_k))
            if i == 0 and self.p.aggregation == "mean":
                fed.event("weights", weighting="size", weights=w)
            y, target = self.ensemble(y_k, w)  # 15, eq. 10
            practice = self.practice(fed, i / len(batches), (i + 1) / len(batches))
            feedback, loss = self.central_step(fed, i, x0, y, target, practice)  # 16-18, eqs. 11, 12
            lesson = replace(feedback, answered=items(x0), rows=following, practice=practice)
            each = {site: {"weight": w.get(site, 0.0)} for site in sites}
            asked = None if following is None else predictions(following, fed.central.classes)
            asking = learn.ask(lesson, each=each, to=sites, check=asked)
            y_k = yield asking if following is None else summed(asking, of)  # 19-21, eqs. 13-15
            fed.progress("interactive", i + 1, len(batches), loss=loss)
        return {"loss": loss}

    def ask_batch(self, fed: Federation, rows: np.ndarray, sites: tuple[str, ...]) -> Ask:
        """Lines 10 to 13 for one batch."""
        return predict_batch.ask(Predict(rows, self.p.dropout), to=sites, check=predictions(rows, fed.central.classes))

    def batches(self, fed: Federation) -> list[np.ndarray]:
        """E_d passes over the public set in its fixed order."""
        size, rows = self.p.batch_size or fed.central.learner.batch_size, fed.public_rows
        return [rows[start : start + size] for start in range(0, len(rows), size)] * self.p.distill_epochs

    def ensemble(self, replies: list[Reply], w: dict[str, float]) -> tuple[Matrix, Matrix]:
        """Return the sites' targets (y, or z for its argmax) and the central model's."""
        logits, rule = logits_of(replies), self.p.aggregation
        if self.p.average == "probabilities":
            y = combine({site: softmax(z) for site, z in logits.items()}, w, rule, probabilities=True)
        else:
            y = softmax(combine(logits, w, rule))
        if self.p.target == "soft":
            return y, y
        return y, combine({site: one_hot_votes(z) for site, z in logits.items()}, w, rule, probabilities=True)

    def central_step(
        self, fed: Federation, i: int, x0: np.ndarray, y: Matrix, target: Matrix, practice: Practice
    ) -> tuple[Lesson, float]:
        """One step of the central model, and how it moved the loss on a labelled batch: by h, or as the matrix G."""
        central, mode = fed.central, self.p.feedback
        practice = replace(practice, optimizer=self.p.server_optimizer)
        eta = central.learner.rate("distil", practice)
        strength = (1.0 / eta if eta else 0.0) if self.p.lambda_ == "1/eta" else self.p.lambda_
        loss_kind: Literal["hard", "soft"] = "hard" if self.p.target == "votes" else "soft"
        back = Lesson(x0, y, self.p.distil, loss_kind, "none", strength=strength, dropout=self.p.dropout)
        if mode == "none":
            return back, central.step(x0, target, practice)
        xv = central.draw_labelled(len(x0), fed.number, i)  # 17
        if mode == "exact":  # eq. 14, factored
            g, loss = central.step_with_feedback(x0, target, xv, practice, eta, self.p.dropout, self.p.jacobian)
            of: Literal["logits", "probabilities"] = "probabilities"  # a vote stands for them: straight-through
            if self.p.average == "logits" and loss_kind == "soft":
                of, g = "logits", through_softmax(g, torch.from_numpy(y).to(g))
            return replace(back, feedback="exact", matrix=g.cpu().numpy(), matrix_of=of), loss
        dropout = self.p.dropout and mode == "scalar"
        old = central.validate(xv, dropout)
        loss = central.step(x0, target, practice)  # 16
        return replace(back, feedback="scalar", h=old - central.validate(xv, dropout)), loss  # 18


# --- the site's half ---


@site_verb("query.logits", leaves="predictions", phase="interactive", quick=True, shield=PREDICTED)
def predict_batch(site: Node, asked: Predict) -> Predictions:
    """Logits of one public batch; it stays pending until its feedback comes (lines 12 and 13)."""
    return _predicted(site, asked)


def _predicted(site: Node, asked: Predict) -> Predictions:
    rows = site.public_rows(asked.rows)
    logits = site.learner.logits(site.public, rows, asked.dropout)
    earlier = tuple(one for one in site.pending[-1:] if one.place[0] == site.place[0])  # of the same round
    site.pending = (*earlier, Pending(rows, site.place, asked.dropout, logits))
    return Predictions(items(rows), logits.detach().cpu().numpy(), len(site.private))


@site_verb("train.feedback", leaves="predictions", phase="interactive", quick=True, shield=PREDICTED)
def learn(site: Node, lesson: Lesson) -> Learned:
    """Update on the pending batch (line 21), then predict the next one if the lesson names its rows."""
    waiting, loss = site.pending if lesson.late else site.pending[-1:], None
    site.pending = waiting if lesson.late else ()
    for place, pending in enumerate(waiting):
        if np.array_equal(items(pending.rows), lesson.answered):
            loss = _step(site, pending, lesson)
            site.pending = tuple(replace(later, logits=None) for later in waiting[place + 1 :])  # outdated graphs
            break
    if lesson.rows is None:
        return Learned(len(site.private), loss)
    following = _predicted(site, Predict(lesson.rows, lesson.dropout))
    return Learned(len(site.private), items=following.items, logits=following.logits)


def _step(site: Node, pending: Pending, lesson: Lesson) -> float:
    """Eq. 15: CE(y, f_k) + lambda w_k <G, f_k>, or with the scalar lambda w_k h CE(f_k, argmax z_k)."""
    z_k = pending.logits
    if z_k is None:  # predicted by another process or ahead: the weights of now, at the same place in the run
        with site.learner.at(*pending.place):
            z_k = site.learner.logits(site.public, pending.rows, pending.dropout)
    loss = torch.zeros((), device=z_k.device)
    if lesson.distil:  # eq. 13
        loss = loss + LOSSES[lesson.loss](z_k, site.targets(lesson.ensemble, len(z_k)))
    share = lesson.weight * lesson.strength
    if lesson.feedback == "scalar":
        loss = loss + scalar_surrogate(z_k, share * lesson.h)
    elif lesson.matrix is not None:  # eq. 14
        loss = loss + share * exact_surrogate(z_k, site.targets(lesson.matrix, len(z_k)), lesson.matrix_of)
    site.learner.one_step(loss, "interact", lesson.practice)
    return float(loss.detach())
