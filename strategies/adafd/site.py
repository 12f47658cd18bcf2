"""What a site tells AdaFD of itself: its losses, and how its model fits its texts in a few numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fedstill.common.data.tasks import scores
from fedstill.common.maths.weights import class_losses, mean_entropy
from fedstill.common.wire import Facts, Reply, WireError
from fedstill.common.wire.typed import Message
from fedstill.strategies.adafd.llm import Talk
from fedstill.strategies.generic import Train, train_locally
from fedstill.strategies.verbs import site_verb

if TYPE_CHECKING:
    from fedstill.client.node import Node

SHOWN = 3  # public texts whose logits a language model sees


@dataclass(frozen=True)
class Described(Message):
    """Losses by epoch; of a site with texts also its losses by class, weighted F1 and mean entropy on them."""

    texts: int
    loss: float | None = None
    losses: list[float] | None = None
    entropy: float | None = None
    class_losses: list[float | None] | None = None
    f1_weighted: float | None = None


@site_verb("train.described", leaves="counts", phase="local training")  # losses by class show which classes there are
def train_described(site: Node, task: Train) -> Described:
    """E epochs of CE on the private texts, and how the model fits them."""
    trained = train_locally.work(site, task)
    summary = {name: getattr(trained, name) for name in ("texts", "loss", "losses")}
    if not len(site.private):
        return Described(**summary)
    logits, labels = site.learner.predict(site.private, np.arange(len(site.private))), site.labels.cpu().numpy()
    weighted = scores("f1_weighted", labels, logits)["f1_weighted"]
    return Described(
        **summary, entropy=mean_entropy(logits), class_losses=class_losses(logits, labels), f1_weighted=weighted
    )


def question(sites: Mapping[str, Facts], predicted: Mapping[str, np.ndarray]) -> Talk:
    """What LLMWC asks: four facts of each site, whose names stay here."""
    lines = [
        f"Model {k}: training loss {facts['losses'][-1]:.4f}; weighted F1 on its training texts "
        f"{facts['f1_weighted']:.4f}; mean entropy of its predictions {facts['entropy']:.4f}; logits on the first "
        f"shared texts {np.round(predicted[name][:SHOWN].astype(np.float64), 3).tolist()}"
        for k, (name, facts) in enumerate(sites.items(), start=1)
    ]
    task = (
        "You weigh models in a federation that distils them into one. Each was trained on texts of its own, and all "
        "predicted the same shared texts; their logits will be averaged with your weights. Models that fit better and "
        "are surer with reason deserve more. Answer with numbers and commas only."
    )
    wanted = f"Give {len(lines)} weights from 0 to 1 that sum to 1, in the order of the models, separated by commas."
    return [{"role": "system", "content": task}, {"role": "user", "content": "\n".join([*lines, wanted])}]


def losses_told(classes: int, described: bool) -> Callable[[Reply], None]:
    """Return a check of a site's description of itself: its numbers must be usable for weights."""

    def amount(value: object) -> bool:
        return isinstance(value, int | float) and math.isfinite(value) and value >= 0

    def check(reply: Reply) -> None:
        facts = reply.metrics
        losses, texts = facts.get("losses"), facts.get("texts")
        if not isinstance(texts, int) or texts < 0:
            raise WireError(f"{texts!r} is no number of texts")
        if not isinstance(losses, list) or not losses or not all(map(amount, losses)):
            raise WireError(f"{losses!r} are no losses")
        if described and texts:
            rows = facts.get("class_losses")
            if not isinstance(rows, list) or len(rows) != classes or not all(r is None or amount(r) for r in rows):
                raise WireError(f"{rows!r} are no losses of {classes} classes")
            if not amount(facts.get("f1_weighted")) or not amount(facts.get("entropy")):
                raise WireError("the weighted F1 or the mean entropy is missing or no number")

    return check
