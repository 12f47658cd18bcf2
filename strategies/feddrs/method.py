"""FedDRS. "Text-Free Federated Transformers Knowledge Distillation without GAN", anonymous, under review, 2023."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from fedstill.common.maths.ensemble import mean_arrays, uniform
from fedstill.common.models.learner import Practice
from fedstill.common.states import LazyState, shapes_of
from fedstill.common.wire import Arrays, Ask, Facts, Reply, all_of, class_counts, same_shapes
from fedstill.strategies.base import Method, Params, Round
from fedstill.strategies.feddrs.sampler import Kind, Sampler, Sampling
from fedstill.strategies.predictions import names

ALL: tuple[Kind, ...] = ("random", "target", "adversary")
KINDS: dict[str, tuple[Kind, ...]] = {"mixed": ALL, "adversary_only": ("adversary",), "post_only": ALL}


class FedDRSParams(Params):
    """`sample_rate` is the step of one sample down its own loss; a loss that is a mean over the batch has less."""

    variant: Literal["mixed", "adversary_only", "post_only"] = "mixed"
    local_epochs: int = Field(5, ge=1)
    participation: float = Field(0.8, gt=0, le=1)
    optimizer: Literal["adamw", "adafactor"] = "adamw"
    samples: int = Field(250, ge=0)  # texts that a site draws for a round; 0: all it has
    balance: bool = True  # no site trains on more texts than the smallest one that takes part
    iterations: int = Field(1, ge=1)  # I
    post_iterations: int = Field(3, ge=0)  # I*
    lambda_: float = Field(0.1, ge=0, alias="lambda")
    post_lambda: float | None = Field(None, ge=0)  # of post-processing, if it is not the same
    start: Literal["rows", "gaussian"] = "rows"
    sample_steps: int = Field(100, ge=0)
    sample_rate: float = Field(0.1, gt=0)
    pseudo_texts: int = Field(64, ge=1)
    pseudo_length: int = Field(64, ge=1)
    distill_steps: int = Field(1, ge=1)  # of the central model on one set of pseudo texts
    freeze_embeddings: Literal["auto", "yes", "no"] = "auto"  # after the first round; auto: text-to-text models


class FedDRS(Method):
    """FedAvg whose mean is corrected by every site's model, on pseudo texts that are made from these models alone."""

    name = "feddrs"
    paper = "Anonymous 2023"
    parameters = FedDRSParams
    presets: ClassVar = {
        "paper": {"optimizer": "adafactor", "optimizer_state": "fresh"},
        "authors_code": {"optimizer": "adafactor", "optimizer_state": "fresh"},
    }
    needs_same_models = True
    p: FedDRSParams

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        p = self.p
        how = Sampling(p.pseudo_texts, p.pseudo_length, p.start, p.sample_steps, p.sample_rate)
        self.sampler = Sampler(self.student.learner.model, how)
        self._trained: set[str] = set()  # who has ever taken part

    def round(self, number: int) -> Round:
        omega = self.student.weights()
        replies = yield Ask("train.balanced", omega, self._local(number), check=self._check(omega))  # step 1
        replies = [reply for reply in replies if reply.metrics["texts"]]  # without texts there is nothing to teach
        self._trained.update(names(replies))
        rounds = 0 if self.p.variant == "post_only" else self.p.iterations
        loss = self._correct(replies, rounds, self.p.lambda_, "round")
        if number == self.config.rounds and self.p.post_iterations:  # step 5, over all K models
            others = tuple(name for name in self.link.sites if name in self._trained - set(names(replies)))
            if others:
                replies = replies + (yield Ask("query.trained", to=others, check=self._check(omega)))
            replies.sort(key=lambda reply: list(self.link.sites).index(reply.node))
            strength = self.p.lambda_ if self.p.post_lambda is None else self.p.post_lambda
            loss = self._correct(replies, self.p.post_iterations, strength, "post")
        return {"loss": loss, "models": len(replies)}

    def practice(self, start: float = 0.0, end: float = 1.0) -> Practice:
        """With the optimizer of the parameters."""
        return replace(super().practice(start, end), optimizer=self.p.optimizer)

    def _local(self, number: int) -> Facts:
        sizes = [int(self.link.sites[name]["texts"]) for name in self.participants]
        smallest = min((size for size in sizes if size), default=0) if self.p.balance else 0
        limits = [limit for limit in (self.p.samples, smallest) if limit]
        writes = self.student.learner.model.writes
        frozen = number > 1 and (self.p.freeze_embeddings == "yes" or (self.p.freeze_embeddings == "auto" and writes))
        settings = {"epochs": self.p.local_epochs, "frozen": frozen, **self.told(self.practice())}
        return {**settings, "most": min(limits)} if limits else settings

    def _check(self, omega: Arrays) -> Callable[[Reply], None]:
        classes = self.student.classes
        shapes = same_shapes({**omega, "gamma": np.zeros(classes, np.int32)})
        return all_of(shapes, class_counts(classes, "gamma"))

    def _correct(self, replies: list[Reply], iterations: int, strength: float, stage: str) -> float | None:
        """Steps 2 to 4: the plain mean, then I times pseudo texts of every model and steps towards each of them."""
        states = {r.node: _model(r) for r in replies}
        self.student.load_weights(mean_arrays(states, uniform(names(replies))))
        learner, loss = self.student.learner, None
        for i in range(iterations):
            made = []
            for reply in replies:
                with learner.at(self._number, stage, i, reply.node):
                    self.sampler.load(states[reply.node])
                    gamma = reply.arrays["gamma"]
                    made.append([self.sampler.sample(kind, gamma, strength) for kind in KINDS[self.p.variant]])
            with learner.at(self._number, stage, i, "distil"), learner.model.frozen_embeddings():
                terms = partial(map, self.sampler.loss, made)  # eq. 8: one KL a teacher, not to a mean teacher
                loss = learner.descend(terms, self.p.distill_steps, "distil", self.practice())[-1]
        return loss

    def state(self) -> dict[str, np.ndarray]:
        """Who has taken part, in the run's order of sites."""
        return {"trained": np.array([name in self._trained for name in self.link.sites])}

    def load_state(self, arrays: dict[str, np.ndarray]) -> None:
        """Take up what `state` gave."""
        self._trained = {name for name, took in zip(self.link.sites, arrays["trained"], strict=True) if took}


def _model(reply: Reply) -> LazyState:
    """The uploaded model without the histogram, still on disk if that is where it lies."""
    shapes = {name: shape for name, shape in shapes_of(reply.arrays).items() if name != "gamma"}
    return LazyState(shapes, lambda name: reply.arrays[name])
