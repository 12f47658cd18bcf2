"""What methods share that exchange parameters: both halves. Private parts never leave the site."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from fedstill.common.maths.ensemble import by_size, mean_arrays
from fedstill.common.practice import Practice
from fedstill.common.states import LazyState, State, copied, differences, private_names, shapes_of
from fedstill.common.wire import Arrays, Ask, Facts, Reply, WireError
from fedstill.common.wire.checks import same_shapes
from fedstill.common.wire.typed import Message
from fedstill.strategies.base import Method, Params, Round, mean_loss, names, texts_of
from fedstill.strategies.verbs import NOTHING, Nothing, Shield, Verb, site_verb

if TYPE_CHECKING:
    from fedstill.client.node import Node
    from fedstill.server.federation import Federation


# --- what the halves say to each other ---


@dataclass(frozen=True)
class Weights(Message):
    """A state of what is shared; `private` are the patterns of what is not."""

    private: tuple[str, ...] = ()
    weights: State = field(default_factory=dict)


@dataclass(frozen=True)
class TrainShared(Message):
    """E epochs from these weights, or from what the site holds where there are none; `mu` ties it to them."""

    epochs: int
    practice: Practice = Practice()
    private: tuple[str, ...] = ()
    mu: float = 0.0
    most: int | None = None  # private texts, drawn for this call
    weights: State = field(default_factory=dict)


@dataclass(frozen=True)
class TrainedShared(Message):
    """The shared parameters after training."""

    texts: int
    weights: State
    loss: float | None = None  # a site with [privacy] tells no loss


@dataclass(frozen=True)
class Shapes(Message):
    """Names and shapes of what a site would share, and a checksum of what lies frozen under adapters."""

    shapes: dict[str, list[int]]
    frozen: str


# --- the server's half ---


class ParameterParams(Params):
    """`private` are patterns of parameters that stay at each site, such as `*LayerNorm*` or `classifier*`."""

    optimizer_state: Literal["persistent", "fresh"] = "fresh"
    private: tuple[str, ...] = ()


class ParameterMethod(Method):
    """A round: sites get the shared parameters they lack, train, and upload them; the server returns the result."""

    parameters: ClassVar[type[Params]] = ParameterParams
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"paper": {}, "authors_code": {"schedule": "call"}}
    needs_same_models = True
    own_tasks = "possible"
    p: ParameterParams

    def prepare(self, fed: Federation) -> None:
        self.fed = fed

    def site_training(self, fed: Federation) -> tuple[Verb, TrainShared]:
        """What every site does with the model it is given."""
        return train_shared, TrainShared(self.p.local_epochs, self.practice(fed), self.p.private)

    def models(self, sites: Iterable[str]) -> dict[str, Arrays]:
        """The state that each site starts from: here the central model's, one copy for all."""
        wanted = tuple(sites)
        return dict.fromkeys(wanted, self.shared(copy=True)) if wanted else {}

    # --- the steps of a round ---

    def training(self, fed: Federation) -> Ask:
        """E epochs at every participant, from the server's model for it; the shared parameters come up."""
        verb, task = self.site_training(fed)
        each = {site: {"weights": state} for site, state in self.models(self.copies.lacking(fed.participants)).items()}
        return verb.ask(task, each=each, check=same_shapes(self.shared()))

    def giving_back(self, fed: Federation, replies: list[Reply]) -> Ask:
        """The new model to whoever took part, so that it is what sites test; after the last round to everybody."""
        sites = tuple(fed.sites) if fed.number == fed.config.rounds else names(replies)
        each = {site: {"weights": state} for site, state in self.models(sites).items()}
        return take_weights.ask(Weights(self.p.private), each=each, to=sites)

    def shares(self, replies: list[Reply]) -> dict[str, float]:
        """w_k = n_k / n over the sites that answered."""
        return by_size(texts_of(replies))

    def mean(self, replies: list[Reply]) -> LazyState:
        """theta = sum_k w_k theta_k, an array at a time."""
        return mean_arrays({r.node: r.arrays for r in replies}, self.shares(replies))

    def loss(self, replies: list[Reply], name: str = "loss") -> Facts:
        """Return the sites' mean training loss, or another number that they report."""
        return {name: mean_loss(replies, self.shares(replies), name)}

    # --- the central model ---

    @cached_property
    def private(self) -> frozenset[str]:
        """The names that stay at the sites; a pattern that matches nothing, or all there is, is refused."""
        known = list(self.fed.central.learner.weights(copy=False))
        for pattern in self.p.private:
            if not private_names(known, [pattern]):
                raise ValueError(
                    f"method.private: {pattern!r} matches no parameter that {self.fed.config.central.model} would "
                    f"share; its parameters are: {', '.join(known)}"
                )
        chosen = private_names(known, self.p.private)
        if len(chosen) == len(known):
            raise ValueError(f"method.private: {list(self.p.private)} leave nothing to share of {', '.join(known)}")
        return chosen

    def shared(self, copy: bool = False) -> Arrays:
        """The shared part of the central model: a copy, or views that change when the model does."""
        weights = self.fed.central.learner.weights(copy=False)
        shared = {name: value for name, value in weights.items() if name not in self.private}
        return copied(shared) if copy else shared

    def update(self, state: State) -> None:
        """The central model takes over a shared part, an array at a time; its private parts stay as they began."""
        weights = self.fed.central.learner.weights(copy=False)
        self.fed.central.load_weights(
            LazyState(shapes_of(weights), lambda name: (state if name in state else weights)[name])
        )

    def check_sites(self, fed: Federation) -> Round:
        """Same models by name, then by the shapes of what is shared and by what lies frozen under adapters."""
        yield from super().check_sites(fed)
        mine, frozen = shapes_of(self.shared()), fed.central.learner.frozen_sum()
        unfit: dict[str, str] = {}
        for reply in (yield tell_shapes.ask(Weights(self.p.private), to=tuple(fed.sites), optional=True)):
            theirs = {str(name): tuple(shape) for name, shape in reply.metrics["shapes"].items()}
            if wrong := differences(theirs, mine):
                unfit[reply.node] = (
                    f"site {reply.node} and the central model share {len(wrong)} different parameters: "
                    f"{'; '.join(wrong)}. Give both the same model and the same lora, or name what differs "
                    "under method.private"
                )
            elif reply.metrics["frozen"] != frozen:
                unfit[reply.node] = (
                    f"site {reply.node} has other weights under its adapters than the central model, so that adapters "
                    "mean something else there; start both from the same pretrained model"
                )
        fed.without(unfit, tell_shapes.name)
        return {}


def updates(replies: list[Reply], began: Mapping[str, Arrays]) -> Iterable[list[np.ndarray]]:
    """Delta_i = what site i sent minus what it began with: one array of all sites at a time, whole numbers left out."""
    for name, value in next(iter(began.values())).items():
        if value.dtype.kind == "f":
            yield [r.arrays[name] - began[r.node][name] for r in replies]


# --- the site's half ---


SHAPED = Shield(("shapes", "frozen"), after_training=True)


@site_verb("query.shapes", leaves=NOTHING, phase="joining", shield=SHAPED)
def tell_shapes(site: Node, asked: Weights) -> Shapes:
    """Names and shapes of what this site would share, and a checksum of what lies frozen under adapters."""
    shapes = shapes_of(shared_part(site, asked.private, copy=False))
    return Shapes({name: list(shape) for name, shape in shapes.items()}, site.learner.frozen_sum())


@site_verb("train.weights", leaves=NOTHING, phase="weights back", shield=Shield(after_training=True))
def take_weights(site: Node, given: Weights) -> Nothing:
    """Be the model that comes back, such as FedDF's prototype; private parts stay as they are."""
    take(site, given.private, given.weights)
    return Nothing()


SHARED = Shield(("texts",), learned=("weights",))


@site_verb("train.parameters", leaves="weights", phase="local training", shield=SHARED)
def train_shared(site: Node, task: TrainShared) -> TrainedShared:
    """E epochs of CE + mu/2 ||w - w_global||^2 over shared parameters; w_global is given, or what the site holds."""
    if task.weights:
        take(site, task.private, task.weights)
    anchor = shared_part(site, task.private) if task.mu else {}
    loss = train_near(site, task.epochs, task.practice, anchor, task.mu, task.most)
    return TrainedShared(site.size, shared_part(site, task.private), loss)


def shared_part(site: Node, private: tuple[str, ...], copy: bool = True) -> Arrays:
    """What travels of this site's model: all but what the patterns call private."""
    weights = site.learner.weights(copy=copy)
    stays = private_names(weights, private)
    return {name: value for name, value in weights.items() if name not in stays}


def take(site: Node, private: tuple[str, ...], given: State) -> None:
    """Take over the shared part; anything else than exactly that is refused with the list."""
    wrong = differences(shapes_of(given), shapes_of(shared_part(site, private, copy=False)))
    if wrong:
        raise WireError(
            f"{len(wrong)} of the given parameters do not fit what this site shares: {'; '.join(wrong[:8])}"
        )
    site.learner.load_weights({**site.learner.weights(copy=False), **given})


def train_near(
    site: Node,
    epochs: int,
    practice: Practice,
    anchor: Mapping[str, np.ndarray],
    strength: float,
    most: int | None = None,
) -> float:
    """E epochs of CE + strength/2 ||w - anchor||^2, on at most so many texts; the last epoch's mean loss."""
    distance = _distance(site, anchor) if strength else None

    def loss(outputs: Tensor, places: np.ndarray) -> Tensor:
        value = site.private_loss(outputs, places)
        return value if distance is None else value + strength / 2 * distance()

    return site.train_privately(epochs, practice, loss, most)[-1]


def _distance(site: Node, anchor: Mapping[str, np.ndarray]) -> Callable[[], Tensor]:
    """||w - anchor||^2 over the trainable parameters that the anchor has."""
    pairs = [
        (parameter, torch.from_numpy(np.array(anchor[name])).to(parameter))
        for name, parameter in site.learner.model.trainable_parameters().items()
        if name in anchor
    ]
    return lambda: torch.stack([(parameter - fixed).square().sum() for parameter, fixed in pairs]).sum()
