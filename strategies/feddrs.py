"""FedDRS. "Text-Free Federated Transformers Knowledge Distillation without GAN", anonymous, under review, 2023."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedstill.common.learner import Practice
from fedstill.common.maths import pseudo
from fedstill.common.maths.ensemble import mean_arrays, uniform
from fedstill.common.models import TextModel
from fedstill.common.wire import Ask, Reply, all_of, class_counts, same_shapes
from fedstill.strategies.base import Method, Params, Round
from fedstill.strategies.predicting import names

Pseudo = tuple[Tensor, Tensor, Tensor]  # theta, the labels it was made for, what its teacher says of it


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
        self.student.learner.model.check_takes_embeddings()
        self._trained: set[str] = set()  # who has ever taken part

    def round(self, number: int) -> Round:
        omega = self.student.weights()
        replies = yield Ask("train.balanced", omega, self._local(number), check=self._check(omega))  # step 1
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

    def _local(self, number: int) -> dict[str, Any]:
        sizes = [int(self.link.sites[name]["texts"]) for name in self.participants]
        limits = [limit for limit in (self.p.samples, min(sizes) if self.p.balance else 0) if limit]
        writes = self.student.learner.model.writes
        frozen = number > 1 and (self.p.freeze_embeddings == "yes" or (self.p.freeze_embeddings == "auto" and writes))
        settings = {"epochs": self.p.local_epochs, "frozen": frozen, **self.told(self.practice())}
        return {**settings, "most": min(limits)} if limits else settings

    def _check(self, omega: dict[str, np.ndarray]) -> Any:
        classes = self.student.classes
        shapes = same_shapes({**omega, "gamma": np.zeros(classes, np.int32)})
        return all_of(shapes, class_counts(classes, "gamma"))

    def _correct(self, replies: list[Reply], iterations: int, strength: float, stage: str) -> float:
        """Steps 2 to 4: the plain mean, then I times pseudo texts of every model and a step towards each; eq. 8."""
        states = {r.node: {n: v for n, v in r.arrays.items() if n != "gamma"} for r in replies}
        self.student.load_weights(mean_arrays(states, uniform(names(replies))))
        learner, loss = self.student.learner, float("nan")
        for i in range(iterations):
            made: list[list[Pseudo]] = []
            for reply in replies:
                with learner.at(self._number, stage, i, reply.node):
                    made.append(list(self._sample(states[reply.node], reply.arrays["gamma"], strength)))
            with learner.at(self._number, stage, i, "distil"), learner.model.frozen_embeddings():
                *_, loss = learner.descend(
                    lambda sets=made: map(self._loss, sets), self.p.distill_steps, "distil", self.practice()
                )
        return loss

    def _sample(self, state: dict[str, np.ndarray], gamma: np.ndarray, strength: float) -> Iterator[Pseudo]:
        """theta_rd, theta_tr and theta_ad of one uploaded model, with its own embeddings."""
        teacher, student, p = self.teacher, self.student.learner.model, self.p
        teacher.load_trainable_state({name: torch.from_numpy(np.array(value)) for name, value in state.items()})
        student.eval()
        losses = {
            "random": None,
            "target": lambda theta: pseudo.target_loss(teacher.from_embeddings, theta, labels),
            "adversary": lambda theta: pseudo.adversary_loss(
                teacher.from_embeddings, student.from_embeddings, theta, labels, strength
            ),
        }
        for kind in ("adversary",) if p.variant == "adversary_only" else losses:
            labels = pseudo.draw_labels(torch.from_numpy(np.array(gamma)), p.pseudo_texts).to(teacher.device)
            if p.start == "rows":
                vocabulary = teacher.embedding.num_embeddings
                theta = pseudo.draw_rows(teacher.embed, vocabulary, p.pseudo_texts, p.pseudo_length)
            else:
                theta = pseudo.draw_gaussian(teacher.embedding.weight, p.pseudo_texts, p.pseudo_length)
            if (loss := losses[kind]) is not None:
                theta = pseudo.improve(theta, loss, p.sample_rate, p.sample_steps)
            yield theta, labels, pseudo.teacher_says(teacher.from_embeddings, theta, labels)

    def _loss(self, sets: list[Pseudo]) -> Tensor:
        """One teacher's term of eq. 8: its kinds of pseudo texts count equally."""
        answers = self.student.learner.model.from_embeddings
        return torch.stack([pseudo.pseudo_distillation(answers, *made) for made in sets]).mean()

    @cached_property
    def teacher(self) -> TextModel:
        """The model that uploaded weights are put into, in eval mode."""
        return copy.deepcopy(self.student.learner.model).eval()

    def state(self) -> dict[str, np.ndarray]:
        """Who has taken part, in the run's order of sites."""
        return {"trained": np.array([name in self._trained for name in self.link.sites])}

    def load_state(self, arrays: dict[str, np.ndarray]) -> None:
        """Take up what `state` gave."""
        self._trained = {name for name, took in zip(self.link.sites, arrays["trained"], strict=True) if took}
