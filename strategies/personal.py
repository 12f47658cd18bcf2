"""Several models at the server: one for each site, group or cluster."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from fedstill.common.maths.ensemble import mean_arrays
from fedstill.common.wire import Arrays, Reply
from fedstill.strategies.parameters import ParameterMethod


class States:
    """A state for every key, all of them `first` until they are set. Arrays are replaced, never changed in place."""

    def __init__(self, first: Arrays) -> None:
        self.first = first
        self._set: dict[str, Arrays] = {}

    def __getitem__(self, key: str) -> Arrays:
        return self._set.get(key, self.first)

    def __setitem__(self, key: str, state: Arrays) -> None:
        self._set[key] = state

    def __iter__(self) -> Iterator[str]:
        return iter(self._set)

    def arrays(self) -> Arrays:
        """Everything that was set, for a checkpoint."""
        return {f"{key}/{name}": value for key, state in self._set.items() for name, value in state.items()}

    def load(self, arrays: Arrays) -> None:
        """Take up what `arrays` gave."""
        self._set = {}
        for place, value in arrays.items():
            key, _, name = place.partition("/")
            self._set.setdefault(key, {})[name] = value


class PersonalMethod(ParameterMethod):
    """Sites start from the state of their key. The central model is the mean over the sites, to have one to show."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.states = States(self.central(copy=True))

    def key_of(self, site: str) -> str:
        """Whose state this site shares; its own by default."""
        return site

    def models(self, sites: Iterable[str]) -> dict[str, Arrays]:
        """The state of each site's key."""
        return {site: self.states[self.key_of(site)] for site in sites}

    def average(self, replies: list[Reply]) -> None:
        """Each key's state becomes the mean of what came from its sites; where none came it stays."""
        for key in sorted({self.key_of(r.node) for r in replies}):
            self.states[key] = dict(self.mean([r for r in replies if self.key_of(r.node) == key]))

    def show_mean(self, replies: list[Reply]) -> None:
        """The central model as the mean, by size, of the states of the sites that answered."""
        self.update(mean_arrays(self.models(r.node for r in replies), self.shares(replies)))

    def state(self) -> dict[str, np.ndarray]:
        """The states."""
        return {f"states/{name}": value for name, value in self.states.arrays().items()}

    def load_state(self, arrays: dict[str, np.ndarray]) -> None:
        """Take up what `state` gave."""
        self.states.load(
            {name.removeprefix("states/"): value for name, value in arrays.items() if name.startswith("states/")}
        )
