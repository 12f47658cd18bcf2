"""Exchange of parameters: take over what is shared, train near it, send it back. Private parts never leave the site."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from fedstill.client.verbs.registry import Answer, practice_of, verb
from fedstill.common.states import State, differences, private_names, shapes_of
from fedstill.common.wire import Arrays, Ask, WireError

if TYPE_CHECKING:
    from fedstill.client.node import Node

DITTO = "ditto/"  # under which a site keeps the private parts of Ditto's shared model


@verb("query.shapes")
def shapes(node: Node, ask: Ask) -> Answer:
    """Names and shapes of what this site would share, and a checksum of what lies frozen under adapters."""
    found = {name: list(shape) for name, shape in shapes_of(_shared(node, ask, copy=False)).items()}
    return {}, {"shapes": found, "frozen": node.learner.frozen_sum()}


@verb("train.weights")
def take_over(node: Node, ask: Ask) -> Answer:
    """Be the model that comes back, such as FedDF's prototype; private parts stay as they are."""
    _take(node, ask, ask.arrays)
    return {}, {}


@verb("train.parameters")
def train(node: Node, ask: Ask) -> Answer:
    """E epochs of CE + mu/2 ||w - w_global||^2 over shared parameters; w_global is given, or what the site holds."""
    if ask.arrays:
        _take(node, ask, ask.arrays)
    loss = _train_near(node, ask, _shared(node, ask), float(ask.settings.get("mu", 0.0)))
    return _shared(node, ask), {"texts": len(node.private), "loss": loss}


@verb("train.ditto")
def ditto(node: Node, ask: Ask) -> Answer:
    """Ditto: the shared model as in FedAvg, then the site's own v near w_global; v is what the site has and tests."""
    v = node.learner.whole()
    begun = f"{DITTO}begun" in node.kept
    private = {name.removeprefix(DITTO): value for name, value in node.kept.items() if name.startswith(DITTO)}
    private.pop("begun", None)
    node.learner.load_whole({**v, **private})
    _take(node, ask, ask.arrays)
    loss = _train_near(node, ask, {}, 0.0)
    shared = _shared(node, ask)
    trained = node.learner.whole()
    node.kept.update({f"{DITTO}{name}": value for name, value in trained.items() if name not in shared})
    node.kept[f"{DITTO}begun"] = np.ones(1, np.int8)
    node.learner.load_whole(v if begun else {**v, **ask.arrays})  # v begins as the first w_global
    own = _train_near(node, ask, ask.arrays, float(ask.settings["lambda"]))
    return shared, {"texts": len(node.private), "loss": loss, "own_loss": own}


def _shared(node: Node, ask: Ask, copy: bool = True) -> Arrays:
    """What travels of this site's model: all but what the Ask's patterns call private."""
    own = node.learner.weights(copy=copy)
    private = private_names(own, ask.settings.get("private", ()))
    return {name: value for name, value in own.items() if name not in private}


def _take(node: Node, ask: Ask, given: State) -> None:
    """Take over the shared part; anything else than exactly that is refused with the list."""
    wrong = differences(shapes_of(given), shapes_of(_shared(node, ask, copy=False)))
    if wrong:
        raise WireError(
            f"{len(wrong)} of the given parameters do not fit what this site shares: {'; '.join(wrong[:8])}"
        )
    node.learner.load_weights({**node.learner.weights(copy=False), **given})


def _train_near(node: Node, ask: Ask, anchor: Mapping[str, np.ndarray], strength: float) -> float:
    """E epochs of CE + strength/2 ||w - anchor||^2; the last epoch's mean loss."""
    distance = _distance(node, anchor) if strength else None

    def loss(outputs: Tensor, places: np.ndarray) -> Tensor:
        value = node.private_loss(outputs, places)
        return value if distance is None else value + strength / 2 * distance()

    return node.train_privately(int(ask.settings["epochs"]), practice_of(ask), loss)[-1]


def _distance(node: Node, anchor: Mapping[str, np.ndarray]) -> Callable[[], Tensor]:
    """||w - anchor||^2 over the trainable parameters that the anchor has."""
    pairs = [
        (parameter, torch.from_numpy(np.array(anchor[name])).to(parameter))
        for name, parameter in node.learner.model.trainable_parameters().items()
        if name in anchor
    ]
    return lambda: torch.stack([(parameter - fixed).square().sum() for parameter, fixed in pairs]).sum()
