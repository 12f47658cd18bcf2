"""What methods share that exchange parameters: what is private, who starts from what, and what comes back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any, ClassVar, Literal

import numpy as np

from fedstill.common.maths.ensemble import by_size, mean_arrays
from fedstill.common.states import LazyState, State, copied, differences, private_names, shapes_of
from fedstill.common.wire import Arrays, Ask, Facts, Reply, same_shapes
from fedstill.strategies.base import Method, Params
from fedstill.strategies.predictions import names


class ParameterParams(Params):
    """`private` are patterns of parameters that stay at each site, such as `*LayerNorm*` or `classifier*`."""

    optimizer_state: Literal["persistent", "fresh"] = "fresh"
    private: tuple[str, ...] = ()


class ParameterMethod(Method):
    """A round: shared parameters go to the sites that lack them, E epochs, up they come, and back goes the result."""

    parameters: ClassVar[type[Params]] = ParameterParams
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"paper": {}, "authors_code": {"schedule": "call"}}
    needs_same_models = True
    any_task = True
    verb: ClassVar[str] = "train.parameters"
    p: ParameterParams

    def site_settings(self) -> Facts:
        """What a site is told beside its epochs."""
        return {}

    def models(self, sites: Iterable[str]) -> dict[str, Arrays]:
        """The state that each site starts from: here the central model's, one copy for all."""
        wanted = tuple(sites)
        return dict.fromkeys(wanted, self.central(copy=True)) if wanted else {}

    # --- the steps of a round ---

    def training(self) -> Ask:
        """E epochs at every participant, from the server's model for it; the shared parameters come up."""
        settings = {"epochs": self.p.local_epochs, **self.told(self.practice()), **self._patterns()}
        each = self.models(site for site in self.participants if site not in self._holders)
        return Ask(self.verb, {}, {**settings, **self.site_settings()}, each, check=same_shapes(self.central()))

    def giving_back(self, replies: list[Reply]) -> Ask:
        """The new model to whoever took part, so that it is what sites test; after the last round to everybody."""
        sites = tuple(self.link.sites) if self._number == self.config.rounds else names(replies)
        return Ask("train.weights", {}, self._patterns(), self.models(sites), to=sites)

    def held(self, replies: list[Reply]) -> None:
        """These sites have the new model: it need not be sent again."""
        self._holders = frozenset(names(replies))

    def shares(self, replies: list[Reply]) -> dict[str, float]:
        """w_k = n_k / n over the sites that answered."""
        return by_size({r.node: r.metrics["texts"] for r in replies})

    def mean(self, replies: list[Reply]) -> LazyState:
        """theta = sum_k w_k theta_k, an array at a time."""
        return mean_arrays({r.node: r.arrays for r in replies}, self.shares(replies))

    def loss(self, replies: list[Reply], name: str = "loss") -> Facts:
        """The sites' mean training loss, or another number that they tell."""
        shares = self.shares(replies)
        return {name: sum(shares[r.node] * r.metrics[name] for r in replies)}

    # --- the central model ---

    @cached_property
    def private(self) -> frozenset[str]:
        """The names that stay at the sites; a pattern that matches nothing, or all there is, is refused."""
        known = list(self.student.learner.weights(copy=False))
        for pattern in self.p.private:
            if not private_names(known, [pattern]):
                raise ValueError(
                    f"method.private: {pattern!r} matches no parameter that {self.config.central.model} would share; "
                    f"its parameters are: {', '.join(known)}"
                )
        found = private_names(known, self.p.private)
        if len(found) == len(known):
            raise ValueError(f"method.private: {list(self.p.private)} leave nothing to share of {', '.join(known)}")
        return found

    def central(self, copy: bool = False) -> Arrays:
        """The shared part of the central model: a copy, or views that change when the model does."""
        own = self.student.learner.weights(copy=False)
        shared = {name: value for name, value in own.items() if name not in self.private}
        return copied(shared) if copy else shared

    def update(self, state: State) -> None:
        """The central model takes over a shared part, an array at a time; its private parts stay as they began."""
        own = self.student.learner.weights(copy=False)
        self.student.load_weights(LazyState(shapes_of(own), lambda name: (state if name in state else own)[name]))

    def _patterns(self) -> Facts:
        return {"private": list(self.p.private)}

    def _check_models(self) -> None:
        """Same models by name, then by the shapes of what is shared and by what lies frozen under adapters."""
        super()._check_models()
        mine, frozen = shapes_of(self.central()), self.student.learner.frozen_sum()
        for reply in self.ask(Ask("query.shapes", {}, self._patterns(), to=tuple(self.link.sites)), quorum=False):
            theirs = {str(name): tuple(shape) for name, shape in reply.metrics["shapes"].items()}
            if wrong := differences(theirs, mine):
                raise ValueError(
                    f"site {reply.node} and the central model share {len(wrong)} different parameters: "
                    f"{'; '.join(wrong)}. Give both the same model and the same lora, or name what differs "
                    "under method.private"
                )
            if reply.metrics["frozen"] != frozen:
                raise ValueError(
                    f"site {reply.node} has other weights under its adapters than the central model, so that adapters "
                    "mean something else there; start both from the same pretrained model"
                )


def updates(replies: list[Reply], began: Mapping[str, Arrays]) -> Iterable[list[np.ndarray]]:
    """Delta_i = what site i sent minus what it began with: one array of all sites at a time, whole numbers left out."""
    for name, value in next(iter(began.values())).items():
        if value.dtype.kind == "f":
            yield [r.arrays[name] - began[r.node][name] for r in replies]
