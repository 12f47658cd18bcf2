"""FedDRS. "Text-Free Federated Transformers Knowledge Distillation without GAN", anonymous, under review, 2023."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field

from fedstill.common.maths.ensemble import mean_arrays, uniform
from fedstill.common.maths.losses import cross_entropy
from fedstill.common.practice import Practice
from fedstill.common.states import LazyState, State, shapes_of
from fedstill.common.wire import Arrays, Reply
from fedstill.common.wire.checks import all_of, class_counts, same_shapes
from fedstill.common.wire.typed import Message
from fedstill.strategies.base import BALANCED, BalancedMethod, BalancedParams, Round, names
from fedstill.strategies.feddrs.sampler import Kind, Sampler, Sampling
from fedstill.strategies.verbs import Nothing, site_verb

if TYPE_CHECKING:
    from fedstill.client.node import Node
    from fedstill.common.checkpoint import Nested
    from fedstill.server.federation import Federation

ALL: tuple[Kind, ...] = ("random", "target", "adversary")
KINDS: dict[str, tuple[Kind, ...]] = {
    "mixed": ALL,
    "random_only": ("random",),
    "target_only": ("target",),
    "adversary_only": ("adversary",),
    "post_only": ALL,
}


class FedDRSParams(BalancedParams):
    """`sample_rate` is the step of one sample down its own loss; a loss that is a mean over the batch has less."""

    variant: Literal["mixed", "random_only", "target_only", "adversary_only", "post_only"] = "mixed"
    local_epochs: int = Field(5, ge=1)
    participation: float = Field(0.8, gt=0, le=1)
    samples: int = Field(250, ge=0)
    balance: bool = True
    iterations: int = Field(1, ge=1)  # I
    post_iterations: int = Field(3, ge=0)  # I*
    lambda_: float = Field(0.1, ge=0, alias="lambda")
    adversary: Literal["ce", "kl"] = "ce"  # what lambda pushes up: the student's CE, or its KL from the teacher
    post_lambda: float | None = Field(None, ge=0)  # of post-processing, if it is not the same
    start: Literal["rows", "gaussian"] = "rows"
    sample_steps: int = Field(100, ge=0)
    sample_rate: float = Field(0.1, gt=0)
    pseudo_texts: int = Field(64, ge=1)
    pseudo_length: int = Field(64, ge=1)
    distill_steps: int = Field(1, ge=1)  # of the central model on one set of pseudo texts
    freeze_embeddings: Literal["auto", "yes", "no"] = "auto"  # after the first round; auto: text-to-text models


@dataclass(frozen=True)
class TrainBalanced(Message):
    """E epochs from these weights on at most so many private texts; `frozen`: word embeddings stand still."""

    epochs: int
    frozen: bool = False
    most: int | None = None
    practice: Practice = Practice()
    weights: State = field(default_factory=dict)


@dataclass(frozen=True)
class Uploaded(Message):
    """A site's model and gamma_k: how many private texts of each class."""

    gamma: np.ndarray
    texts: int
    weights: State
    loss: float | None = None
    used: int | None = None


class FedDRS(BalancedMethod):
    """FedAvg whose mean is corrected by every site's model, on pseudo texts that are made from these models alone."""

    name = "feddrs"
    paper = "Anonymous 2023"
    parameters = FedDRSParams
    presets: ClassVar = {
        "paper": BALANCED,
        "authors_code": BALANCED,
    }
    needs_same_models = True
    p: FedDRSParams

    def prepare(self, fed: Federation) -> None:
        p = self.p
        sampling = Sampling(p.pseudo_texts, p.pseudo_length, p.start, p.sample_steps, p.sample_rate, p.adversary)
        self.fed, self.sampler = fed, Sampler(fed.central.learner.model, sampling)
        self.trained: set[str] = set()  # who has ever taken part

    def round(self, fed: Federation) -> Round:  # Algorithm 1
        omega = fed.central.weights()
        check = self._check(omega)
        replies = yield train_balanced.ask(replace(self._local(), weights=omega), check=check)  # step 1
        replies = [reply for reply in replies if reply.metrics["texts"]]  # without texts there is nothing to teach
        self.trained.update(names(replies))
        iterations = 0 if self.p.variant == "post_only" else self.p.iterations
        loss = self._correct(replies, iterations, self.p.lambda_, "round")
        if fed.number == fed.config.rounds and self.p.post_iterations:  # step 5, over all K models
            others = tuple(name for name in fed.sites if name in self.trained - set(names(replies)))
            if others:
                replies = replies + (yield upload.ask(to=others, check=check, optional=True))
            replies.sort(key=lambda reply: list(fed.sites).index(reply.node))
            strength = self.p.lambda_ if self.p.post_lambda is None else self.p.post_lambda
            loss = self._correct(replies, self.p.post_iterations, strength, "post")
        return {"loss": loss, "models": len(replies)}

    def _local(self) -> TrainBalanced:
        writes, freeze = self.fed.central.learner.model.writes, self.p.freeze_embeddings
        frozen = self.fed.number > 1 and (freeze == "yes" or (freeze == "auto" and writes))
        return TrainBalanced(self.p.local_epochs, frozen, self.most_texts(self.fed), self.practice(self.fed))

    def _check(self, omega: Arrays) -> Callable[[Reply], None]:
        classes = self.fed.central.classes
        shapes = same_shapes({**omega, "gamma": np.zeros(classes, np.int32)})
        return all_of(shapes, class_counts(classes, "gamma"))

    def _correct(self, replies: list[Reply], iterations: int, strength: float, stage: str) -> float | None:
        """Steps 2 to 4: the plain mean, then I times pseudo texts of every model and steps towards each of them."""
        central, number = self.fed.central, self.fed.number
        states = {r.node: _model(r) for r in replies}
        central.load_weights(mean_arrays(states, uniform(names(replies))))
        learner, loss = central.learner, None
        for i in range(iterations):
            made = []
            for reply in replies:
                with learner.at(number, stage, i, reply.node):
                    self.sampler.load(states[reply.node])
                    gamma = reply.arrays["gamma"]
                    made.append([self.sampler.sample(kind, gamma, strength) for kind in KINDS[self.p.variant]])
            with learner.at(number, stage, i, "distil"), learner.model.frozen_embeddings():
                terms = partial(map, self.sampler.loss, made)  # eq. 8: one KL a teacher, not to a mean teacher
                loss = learner.descend(terms, self.p.distill_steps, "distil", self.practice(self.fed))[-1]
        return loss

    def state(self) -> Nested:
        """Who has taken part, in the run's order of sites."""
        return {"trained": np.array([name in self.trained for name in self.fed.sites])}

    def load_state(self, state: Nested) -> None:
        """Restore what `state` returned."""
        self.trained = {name for name, took in zip(self.fed.sites, state["trained"], strict=True) if took}


def _model(reply: Reply) -> LazyState:
    """The uploaded model without the histogram, still on disk if that is where it lies."""
    shapes = {name: shape for name, shape in shapes_of(reply.arrays).items() if name != "gamma"}
    return LazyState(shapes, lambda name: reply.arrays[name])


# --- the site's half ---


@site_verb("train.balanced", leaves=("weights", "counts"), phase="local training")
def train_balanced(site: Node, task: TrainBalanced) -> Uploaded:
    """E epochs of CE from the given weights, on at most `most` private texts that are drawn for this call."""
    site.learner.load_weights(task.weights)
    rows = torch.randperm(len(site.private)).numpy()[: task.most or len(site.private)]
    labels = site.labels[torch.from_numpy(rows).to(site.labels.device)]
    with site.learner.model.frozen_embeddings() if task.frozen else nullcontext():
        losses = site.learner.fit(
            site.private,
            rows,
            lambda logits, places: cross_entropy(logits, labels[places]),
            task.epochs,
            "local",
            task.practice,
        )
    return replace(_uploaded(site), loss=losses[-1], used=len(rows))


@site_verb("query.trained", leaves=("weights", "counts"), phase="post-processing")
def upload(site: Node, nothing: Nothing) -> Uploaded:
    """The model as it was last trained here, and the label histogram."""
    return _uploaded(site)


def _uploaded(site: Node) -> Uploaded:
    counts = torch.bincount(site.labels, minlength=len(site.task.labels)).cpu().numpy()
    return Uploaded(counts.astype(np.int32), len(site.private), site.learner.weights())
