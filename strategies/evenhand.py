"""Evenhand, our own: no site's habits count as knowledge, and its weight is what it knows of texts that it sees blind.

1. *Even training.* A site whose texts are mostly of one class learns that class's frequency along with the words.
   Each site's loss is CE(z + e (log pi_k - log pi)): with its own frequencies pi_k added and the federation's pi
   taken away, z is what the site would say of texts in the federation's mix (logit adjustment, Menon et al. 2021).
   At e = 1/2 half of the habit is left: a class that is rare at a site is learned from few texts. pi_k stays there.
2. *Blind weights.* The server's labelled texts stand unmarked among the public ones (`data.blind`). The weights of
   z = sum_k w_k z_k are those that predict their labels best; a weight can fall to 0, and their sum is a temperature.
3. *Memory.* m <- z/2 + m/2 over the rounds: sites that train on few texts waver, and their mean with them.
4. *Sure mutual distillation.* Central model and sites learn softmax(m / T) at T = 1/2 on all public texts, the central
   model also the labels that the server has.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal, cast

import numpy as np
import torch
from pydantic import Field

from fedstill.common.maths.ensemble import Matrix, by_size, mean_predictions, softmax, uniform
from fedstill.common.maths.losses import cross_entropy
from fedstill.common.maths.weights import fitted_weights, log_shares
from fedstill.common.practice import Practice
from fedstill.common.wire import Ask, Reply
from fedstill.common.wire.typed import Message
from fedstill.strategies.base import Method, Params, Round, names, texts_of
from fedstill.strategies.formulas import both_ways
from fedstill.strategies.generic import Trained
from fedstill.strategies.predictions import Distil, ask_predictions, distil, logits_of
from fedstill.strategies.verbs import NOTHING, site_verb

if TYPE_CHECKING:
    from fedstill.client.node import Node
    from fedstill.common.checkpoint import Nested
    from fedstill.server.federation import Federation


class EvenhandParams(Params):
    """Each part can be left out, for ablations."""

    even: float = Field(0.5, ge=0, le=1)  # part 1: the share of a site's habit that is taken away
    weights: Literal["blind", "size", "uniform"] = "blind"  # part 2
    ridge: float = Field(1.0, ge=0)  # pull of blind weights towards size weights, in units of one labelled text
    labels: float = Field(0.5, ge=0, le=1)  # share of the true label in the central model's targets, where it is known
    memory: float = Field(0.5, ge=0, lt=1)  # part 3: the share of what was remembered
    temperature: float = Field(0.5, gt=0)  # part 4: below 1, what is taught is surer than the ensemble
    teach: bool = True  # whether sites learn from the ensemble too
    distill_epochs: int = Field(3, ge=1)


@dataclass(frozen=True)
class EvenTrain(Message):
    """E epochs on the private texts; `mix` is log pi, empty for plain CE."""

    epochs: int
    practice: Practice
    mix: np.ndarray
    even: float


class Evenhand(Method):
    """Sites learn without their class frequencies, count by what they say of blind texts, and learn from the sum."""

    name = "evenhand"
    paper = "fedstill 2026"
    parameters = EvenhandParams
    presets: ClassVar = {"paper": {}, "authors_code": {}}
    formula = staticmethod(both_ways)
    no_pipeline = "fits the sites' weights to blind texts among all public ones, so that nothing can be learned before"
    p: EvenhandParams

    def prepare(self, fed: Federation) -> None:
        self.remembered: Matrix | None = None
        if self.p.weights == "blind" and not len(fed.central.blind):
            raise ValueError(
                "evenhand weighs sites by what they say of the server's labelled texts: set data.blind = true and "
                "data.labelled above 0, or method.weights = 'size'"
            )

    def round(self, fed: Federation) -> Round:
        rows = fed.public_rows
        trained = yield self.train_evenly(fed)  # part 1
        replies = yield ask_predictions(fed, rows, names(trained))
        z = mean_predictions(logits_of(replies), self.site_weights(fed, replies))  # part 2
        y = self.taught(z)  # part 3
        practice = self.practice(fed)
        loss = fed.central.distil(rows, self.with_labels(fed, y), "soft", self.p.distill_epochs, practice)  # part 4
        if self.p.teach:
            practice = replace(practice, dropout=self.p.distill_dropout)
            yield distil.ask(Distil(rows, y, "soft", self.p.distill_epochs, practice), to=names(replies))
        return {"loss": loss}

    def taught(self, z: Matrix) -> Matrix:
        """Part 3: the ensemble with what is remembered of earlier rounds, at its temperature."""
        last = z if self.remembered is None else self.remembered
        self.remembered = self.p.memory * last + (1 - self.p.memory) * z
        return softmax(self.remembered / self.p.temperature)

    def state(self) -> Nested:
        """Return what is remembered."""
        return {} if self.remembered is None else {"remembered": self.remembered}

    def load_state(self, state: Nested) -> None:
        """Restore what `state` returned."""
        self.remembered = cast("Matrix | None", state.get("remembered"))

    def train_evenly(self, fed: Federation) -> Ask:
        """Part 1: pi is the mix of the server's labels, or equal shares where it has none."""
        mix = np.empty(0, np.float32)
        if self.p.even:
            mix = log_shares(np.bincount(fed.central.labels.numpy(), minlength=fed.central.classes))
        return even_training.ask(EvenTrain(self.p.local_epochs, self.practice(fed), mix, self.p.even))

    def site_weights(self, fed: Federation, replies: list[Reply]) -> dict[str, float]:
        """Part 2, or plain weights."""
        sizes = by_size(texts_of(replies)) if self.p.weights != "uniform" else uniform(names(replies))
        weights = sizes
        if self.p.weights == "blind":
            blind = {site: z[fed.central.blind] for site, z in logits_of(replies).items()}
            weights = fitted_weights(blind, fed.central.labels.numpy(), sizes, self.p.ridge)
        fed.event("weights", weighting=self.p.weights, weights=weights)
        return weights

    def with_labels(self, fed: Federation, y: Matrix) -> Matrix:
        """The ensemble, with a share of the true label where the server has it."""
        if not self.p.labels or not len(fed.central.blind):
            return y
        targets, known = y.copy(), fed.central.blind
        true = np.eye(y.shape[1], dtype=y.dtype)[fed.central.labels.numpy()]
        targets[known] = (1 - self.p.labels) * y[known] + self.p.labels * true
        return targets


# --- the site's half ---


@site_verb("train.even", leaves=NOTHING, phase="local training")
def even_training(site: Node, task: EvenTrain) -> Trained:
    """E epochs of CE(z + log pi_k - log pi) on the private texts: the site's own frequencies are not learned."""
    shift = torch.zeros(len(site.task.labels))
    if task.mix.size:
        own = log_shares(np.bincount(site.labels.cpu().numpy(), minlength=len(site.task.labels)))
        shift = torch.from_numpy(task.even * (own - task.mix))
    shift = shift.to(site.labels.device, site.learner.model.dtype)
    losses = site.train_privately(
        task.epochs, task.practice, lambda logits, places: cross_entropy(logits + shift, site.labels[places])
    )
    return Trained(site.size, losses[-1], losses)
