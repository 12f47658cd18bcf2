"""ATC at a site: corrupted texts (ASSIGN), the synthetic set, its representations, and the contrast (CONTRAST)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, cast

import numpy as np
import torch
from torch import Tensor

from fedstill.common.maths.affinity import contrastive_loss
from fedstill.common.models.bert2bert import MixedModel, moved_by
from fedstill.common.practice import Practice
from fedstill.common.states import State
from fedstill.common.wire import Arrays, WireError
from fedstill.common.wire.typed import Message
from fedstill.strategies.atc.corruption import Corrupted, Objective
from fedstill.strategies.verbs import NOTHING, Nothing, site_verb

if TYPE_CHECKING:
    from fedstill.client.node import Node
    from fedstill.client.own_task import OwnTaskNode
    from fedstill.common.models.learner import Rows

AT_ONCE = 64
MOST = 1 << 31  # numbers of a synthetic set


# --- what the server says, and what comes back; `weights` is what the site lacks of its w_n ---


@dataclass(frozen=True)
class Mend(Message):
    """Steps of MLM or of denoising."""

    objective: Objective
    steps: int
    practice: Practice = Practice()
    weights: State = field(default_factory=dict)


@dataclass(frozen=True)
class Encode(Message):
    """How many items of how many positions, and how they are hidden."""

    items: int
    positions: int
    clip: float = 0.0
    noise: float = 0.0
    weights: State = field(default_factory=dict)


Through = Literal["decoder", "encoder"]


@dataclass(frozen=True)
class Represent(Message):
    """The synthetic set comes with the first of these."""

    features: np.ndarray | None = None
    tokens: np.ndarray | None = None
    clip: float = 0.0
    noise: float = 0.0
    through: Through = "decoder"


@dataclass(frozen=True)
class Contrast(Message):
    """Epochs of the own task; the mean h of C+ and every h of C-, where there are neighbours."""

    epochs: int
    temperature: float
    practice: Practice = Practice()
    through: Through = "decoder"
    positive: np.ndarray | None = None
    negatives: np.ndarray | None = None
    weights: State = field(default_factory=dict)


@dataclass(frozen=True)
class SharedGroups(Message):
    """Groups of shared parameters."""

    weights: State = field(default_factory=dict)


@dataclass(frozen=True)
class Update(Message):
    """Delta_n of what was trained and is shared."""

    texts: int
    loss: float
    update: State
    contrast: float | None = None


@dataclass(frozen=True)
class Features(Message):
    """The encoder's last layer, zeros for padding (items x positions x width), in half precision."""

    features: np.ndarray
    texts: int


@dataclass(frozen=True)
class Representations(Message):
    """h of every synthetic item (items x width), in half precision."""

    h: np.ndarray


# --- stage 1: ASSIGN ---


@site_verb("train.corrupted", leaves="weights", phase="assign")
def mend(node: Node, task: Mend) -> Update:
    """Steps of MLM or of denoising on the private inputs; the update of what they move."""
    site = _own_task(node)
    site.take(task.weights)
    groups = moved_by(task.objective)
    before = site.shared(groups)
    rng = np.random.default_rng(int(torch.randint(2**62, (1,))))
    texts = Corrupted(site.model, site.private, task.objective, rng)
    losses = site.learner.fit(
        texts, np.arange(len(texts)), lambda loss, places: loss, 0, "assign", task.practice, steps=task.steps
    )
    return Update(site.size, losses[-1], _update(site, groups, before))


@site_verb("train.shared", leaves=NOTHING, phase="weights back")
def take_shared(node: Node, given: SharedGroups) -> Nothing:
    """Be what the server made of the shared parameters."""
    _own_task(node).take(given.weights)
    return Nothing()


# --- stage 2: CONTRAST ---


@site_verb("query.features", leaves="features", phase="synthetic set")
def encode(node: Node, asked: Encode) -> Features:
    """The encoder's last layer for the first private texts."""
    site = _own_task(node)
    items, places, width = asked.items, asked.positions, site.model.width
    if not 0 < items * places * width <= MOST:
        raise WireError(f"{items} items of {places} places are more than a site shows")
    site.take(asked.weights)
    features = np.zeros((items, places, width), np.float32)
    site.model.eval()
    with torch.inference_mode():
        for start in range(0, items, AT_ONCE):
            rows = np.arange(start, min(start + AT_ONCE, items)) % len(site.private)
            batch = {name: value[:, :places].to(site.model.device) for name, value in site.private.batch(rows).items()}
            states = site.model.states(batch) * batch["attention_mask"].unsqueeze(-1)
            features[start : start + len(rows), : states.shape[1]] = states.cpu().numpy()
    return Features(site.shown(features, asked.clip, asked.noise), site.size)


@site_verb("query.representations", leaves="features", phase="representations")
def represent(node: Node, asked: Represent) -> Representations:
    """h of every synthetic item; the set itself comes with the first Ask and is kept."""
    site = _own_task(node)
    if asked.features is not None and asked.tokens is not None:
        site.kept["synthetic"] = {"features": np.array(asked.features), "tokens": np.array(asked.tokens)}
    count = len(_synthetic(site)["features"])
    site.model.eval()
    with torch.inference_mode():
        starts = range(0, count, AT_ONCE)
        parts = [_represent(site, np.arange(i, min(i + AT_ONCE, count)), asked.through) for i in starts]
    return Representations(site.shown(torch.cat(parts).cpu().numpy(), asked.clip, asked.noise))


@site_verb("train.contrast", leaves="weights", phase="contrast")
def contrast(node: Node, task: Contrast) -> Update:
    """Epochs of the own task, plus eq. 3 where neighbours are given; the update of the encoder alone."""
    site = _own_task(node)
    site.take(task.weights)
    before = site.shared(("encoder",))
    apart: list[Tensor] = []

    def h(items: Rows) -> Tensor:
        return _represent(site, items, task.through)

    def eq_3(own: Tensor, places: Rows) -> Tensor:
        items = places % len(positive)  # the authors' items are paired with the texts by number, too
        apart.append(contrastive_loss(h(items), positive[items], negatives[:, items], task.temperature))
        return own + apart[-1]

    loss = None
    if task.positive is not None and task.negatives is not None:
        positive, negatives = (
            torch.from_numpy(value.astype(np.float32)).to(site.model.device)
            for value in (task.positive, task.negatives)
        )
        loss = eq_3
    losses = site.train_privately(task.epochs, task.practice, loss or (lambda own, places: own))
    mean = float(torch.stack([value.detach() for value in apart]).mean()) if apart else None
    return Update(site.size, losses[-1], _update(site, ("encoder",), before), mean)


def _own_task(node: Node) -> OwnTaskNode:
    if not isinstance(node.learner.model, MixedModel):
        raise WireError('this site shares its task with the run; ATC needs task.name = "mixed"')
    return cast("OwnTaskNode", node)


def _update(site: OwnTaskNode, groups: tuple[str, ...], before: Arrays) -> Arrays:
    return {name: value - before[name] for name, value in site.shared(groups).items()}


def _synthetic(site: OwnTaskNode) -> Arrays:
    if "synthetic" not in site.kept:
        raise WireError("this site has not been given the synthetic set")
    synthetic: Arrays = site.kept["synthetic"]
    return synthetic


def _represent(site: OwnTaskNode, items: Rows, through: Through) -> Tensor:
    synthetic, device = _synthetic(site), site.model.device
    features = torch.from_numpy(synthetic["features"][items].astype(np.float32)).to(device)
    tokens = torch.from_numpy(synthetic["tokens"][items].astype(np.int64)).to(device)
    return site.model.represent(features, tokens, through)
