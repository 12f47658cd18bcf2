"""FedDRS's pseudo texts at the server: made in embedding space from an uploaded model, and what that model says."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedstill.common.maths import pseudo
from fedstill.common.models.text_model import TextModel
from fedstill.common.states import State

Kind = Literal["random", "target", "adversary"]


@dataclass(frozen=True)
class PseudoTexts:
    """A batch: texts x tokens x width, the labels it was made for, and its teacher's probabilities where it answers."""

    theta: Tensor
    labels: Tensor
    said: Tensor


@dataclass(frozen=True)
class Sampling:
    """How many, how long, where they start, how far they go, and what an adversary pushes up."""

    texts: int
    length: int
    start: Literal["rows", "gaussian"]
    steps: int
    rate: float
    adversary: Literal["ce", "kl"] = "ce"


class Sampler:
    """Holds one uploaded model at a time, beside the central one."""

    def __init__(self, student: TextModel, how: Sampling) -> None:
        student.check_takes_embeddings()
        self.student, self.how = student, how
        self.teacher = copy.deepcopy(student).eval()

    def load(self, state: State) -> None:
        """Load the uploaded model."""
        self.teacher.load_trainable_state(state)

    def sample(self, kind: Kind, gamma: np.ndarray, strength: float) -> PseudoTexts:
        """A batch of one kind, with the uploaded model's embeddings and labels drawn from its site's histogram."""
        teacher, student = self.teacher.from_embeddings, self.student.eval().from_embeddings
        labels = pseudo.draw_labels(torch.from_numpy(np.array(gamma)), self.how.texts).to(self.teacher.device)
        adversary = pseudo.adversary_loss if self.how.adversary == "ce" else pseudo.adversary_loss_kl
        losses: dict[Kind, Callable[[Tensor], Tensor]] = {
            "target": lambda theta: pseudo.target_loss(teacher, theta, labels),
            "adversary": lambda theta: adversary(teacher, student, theta, labels, strength),
        }
        theta = self._start()
        if kind in losses:
            theta = pseudo.improve(theta, losses[kind], self.how.rate, self.how.steps)
        return PseudoTexts(theta, labels, pseudo.teacher_says(teacher, theta, labels))

    def loss(self, sets: list[PseudoTexts]) -> Tensor:
        """One teacher's term of eq. 8: its kinds of pseudo texts count equally."""
        answers = self.student.eval().from_embeddings
        terms = [pseudo.pseudo_distillation(answers, made.theta, made.labels, made.said) for made in sets]
        return torch.stack(terms).mean()

    def _start(self) -> Tensor:
        table = self.teacher.embedding
        if self.how.start == "gaussian":
            return pseudo.draw_gaussian(table.weight, self.how.texts, self.how.length)
        return pseudo.draw_rows(self.teacher.embed, table.num_embeddings, self.how.texts, self.how.length)
