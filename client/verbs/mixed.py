"""ATC at a site: corrupted texts (ASSIGN), the synthetic set, its representations, and the contrast (CONTRAST)."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch import Tensor

from fedstill.client.verbs.registry import Answer, practice_of, verb
from fedstill.common.data.site_tasks import Corrupted
from fedstill.common.maths.affinity import contrastive_loss
from fedstill.common.models.bert2bert import moved_by
from fedstill.common.models.learner import Rows
from fedstill.common.wire import Arrays, Ask, WireError

if TYPE_CHECKING:
    from fedstill.client.mixed import MixedNode
    from fedstill.client.node import Node

AT_ONCE = 64
MOST = 1 << 31  # numbers of a synthetic set


def _mixed(node: Node) -> MixedNode:
    if not node.config.mixed:
        raise WireError('this site shares its task with the run; ATC needs task.name = "mixed"')
    return cast("MixedNode", node)


@verb("train.corrupted")
def corrupted(node: Node, ask: Ask) -> Answer:
    """Steps of MLM or of denoising on the private inputs; the update of what they move (ATC, ASSIGN)."""
    site, objective = _mixed(node), ask.settings["objective"]
    if objective not in ("mlm", "denoising"):
        raise WireError(f"this site knows mlm and denoising, not {objective!r}")
    site.take(ask.arrays)
    groups = moved_by(objective)
    before = site.shared(groups)
    texts = Corrupted(site.model, site.private, objective, _draws())
    losses = site.learner.fit(
        texts,
        np.arange(len(texts)),
        lambda loss, places: loss,
        0,
        "assign",
        practice_of(ask),
        steps=int(ask.settings["steps"]),
    )
    return _update(site, groups, before), {"texts": len(site.private), "loss": losses[-1]}


@verb("train.shared")
def shared(node: Node, ask: Ask) -> Answer:
    """Be what the server made of the shared parameters."""
    _mixed(node).take(ask.arrays)
    return {}, {}


def _draws() -> np.random.Generator:
    return np.random.default_rng(int(torch.randint(2**62, (1,))))


def _update(site: MixedNode, groups: tuple[str, ...], before: Arrays) -> Arrays:
    return {name: value - before[name] for name, value in site.shared(groups).items()}


@verb("query.features")
def features(node: Node, ask: Ask) -> Answer:
    """The encoder's last layer for the first private texts, zeros for padding (items x places x width)."""
    site, settings = _mixed(node), ask.settings
    items, places = int(settings["items"]), int(settings["positions"])
    if not 0 < items * places * site.model.mlm.dense.in_features <= MOST:
        raise WireError(f"{items} items of {places} places are more than a site shows")
    site.take(ask.arrays)
    inputs = site.private
    found = np.zeros((items, places, site.model.mlm.dense.in_features), np.float32)
    site.model.eval()
    with torch.inference_mode():
        for start in range(0, items, AT_ONCE):
            rows = np.arange(start, min(start + AT_ONCE, items)) % len(inputs)
            batch = {name: value[:, :places].to(site.model.device) for name, value in inputs.batch(rows).items()}
            states = site.model.states(batch) * batch["attention_mask"].unsqueeze(-1)
            found[start : start + len(rows), : states.shape[1]] = states.cpu().numpy()
    shown = site.shown(found, float(settings["clip"]), float(settings["noise"]), "features", settings["round"])
    return {"features": shown}, {"texts": len(site.private)}


@verb("query.representations")
def representations(node: Node, ask: Ask) -> Answer:
    """h of every synthetic item; the set itself comes with the first Ask and is kept."""
    site, settings = _mixed(node), ask.settings
    if ask.arrays:
        site.kept = {
            **site.kept,
            **{f"synthetic/{name}": np.array(ask.arrays[name]) for name in ("features", "tokens")},
        }
    count = len(_kept(site)[0])
    site.model.eval()
    with torch.inference_mode():
        parts = [_represent(site, np.arange(i, min(i + AT_ONCE, count))) for i in range(0, count, AT_ONCE)]
    found = torch.cat(parts).cpu().numpy()
    shown = site.shown(found, float(settings["clip"]), float(settings["noise"]), "h", settings["round"])
    return {"h": shown}, {}


def _kept(site: MixedNode) -> tuple[np.ndarray, np.ndarray]:
    if "synthetic/features" not in site.kept:
        raise WireError("this site has not been given the synthetic set")
    return site.kept["synthetic/features"], site.kept["synthetic/tokens"]


def _represent(site: MixedNode, items: Rows) -> Tensor:
    synthetic, tokens = _kept(site)
    given = torch.from_numpy(synthetic[items].astype(np.float32)).to(site.model.device)
    return site.model.represent(given, torch.from_numpy(tokens[items].astype(np.int64)).to(site.model.device))


@verb("train.contrast")
def contrast(node: Node, ask: Ask) -> Answer:
    """Epochs of the own task, plus eq. 3 where neighbours are given; the update of the encoder alone."""
    site = _mixed(node)
    told = {name: value for name, value in ask.arrays.items() if name in ("positive", "negatives")}
    site.take({name: value for name, value in ask.arrays.items() if name not in told})
    before = site.shared(("encoder",))
    apart: list[Tensor] = []
    if told:
        positive, negatives = (torch.from_numpy(told[name].astype(np.float32)) for name in ("positive", "negatives"))
        positive, negatives = positive.to(site.model.device), negatives.to(site.model.device)
        temperature = float(ask.settings["temperature"])

    def loss(own: Tensor, places: Rows) -> Tensor:
        if not told:
            return own
        items = places % len(positive)  # the authors' items are paired with the texts by number, too
        apart.append(contrastive_loss(_represent(site, items), positive[items], negatives[:, items], temperature))
        return own + apart[-1]

    losses = site.train_privately(int(ask.settings["epochs"]), practice_of(ask), loss)
    metrics = {"texts": len(site.private), "loss": losses[-1]}
    if apart:
        metrics["contrast"] = float(torch.stack([value.detach() for value in apart]).mean())
    return _update(site, ("encoder",), before), metrics
