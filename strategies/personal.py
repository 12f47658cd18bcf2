"""Several models at the server: one for each site, group or cluster."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from fedstill.common.maths.ensemble import mean_arrays
from fedstill.common.wire import Arrays, Reply
from fedstill.strategies.parameters import ParameterMethod

if TYPE_CHECKING:
    from fedstill.common.checkpoint import Nested
    from fedstill.server.federation import Federation


class PersonalMethod(ParameterMethod):
    """Sites start from the state of their key. The central model is the mean over the sites, to have one to show.

    States are replaced, never changed in place; a key that has none yet starts from the first central model.
    """

    def prepare(self, fed: Federation) -> None:
        super().prepare(fed)
        self.first = self.shared(copy=True)
        self.states: dict[str, Arrays] = {}

    def key_of(self, site: str) -> str:
        """Whose state this site shares; its own by default."""
        return site

    def state_of(self, key: str) -> Arrays:
        """The state of a key."""
        return self.states.get(key, self.first)

    def models(self, sites: Iterable[str]) -> dict[str, Arrays]:
        """The state of each site's key."""
        return {site: self.state_of(self.key_of(site)) for site in sites}

    def average(self, replies: list[Reply]) -> None:
        """Each key's state becomes the mean of what came from its sites; where none came it stays."""
        for key in sorted({self.key_of(r.node) for r in replies}):
            self.states[key] = dict(self.mean([r for r in replies if self.key_of(r.node) == key]))

    def show_mean(self, replies: list[Reply]) -> None:
        """The central model as the mean, by size, of the states of the sites that answered."""
        self.update(mean_arrays(self.models(r.node for r in replies), self.shares(replies)))

    def state(self) -> Nested:
        """The states by key."""
        return {"states": self.states}

    def load_state(self, state: Nested) -> None:
        """Restore what `state` returned."""
        self.states = dict(state.get("states", {}))
