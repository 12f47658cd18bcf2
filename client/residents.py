"""Many sites in one process: a bounded number of them in memory, the others on disk until they are asked.

`Residents` are all sites of a run in this process: there is one copy of each, in memory or on disk. `Kept` are sites
that several processes share (actors of Flower's simulation, to which sites are not bound): each message leaves a site's
state on disk under its own number, and a copy in memory counts only while that number is the newest.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from fedstill.client.aside import OnDisk, fetched, set_aside
from fedstill.client.node import Node
from fedstill.client.own_task import make_node
from fedstill.common import checkpoint
from fedstill.common.config import RunConfig, SiteConfig
from fedstill.common.memory import give_back, one_heap
from fedstill.common.models.frozen import FrozenEncoder
from fedstill.common.models.text_model import TextModel
from fedstill.common.wire import Ask, Facts, Reply

AWAY = "away"  # the folder of a site's state on disk


@dataclass(frozen=True)
class Away:
    """A site on disk."""

    kind: str | None  # of its model, if others can use it
    state: tuple[OnDisk, dict[str, OnDisk]]
    facts: Facts


class Residents:
    """The sites in memory, least recently asked first; a site beyond `most` is put away before another is taken up."""

    def __init__(self, most: int, make: dict[str, Callable[[TextModel | None], Node]]) -> None:
        self.most, self._make = most, make
        self._here: OrderedDict[str, Node] = OrderedDict()
        self._away: dict[str, Away] = {}
        self._spare: tuple[str, TextModel] | None = None  # of the site that was put away last
        self.swaps = 0
        one_heap()

    def node(self, name: str) -> Node:
        """Return a site, taken up from disk if it was put away."""
        if name in self._here:
            self._here.move_to_end(name)
            return self._here[name]
        while len(self._here) >= self.most:
            self._put_away(next(iter(self._here)))
        spare, self._spare = self._spare, None
        if name in self._away:
            away = self._away[name]
            node = self._make[name](spare[1] if spare is not None and spare[0] == away.kind else None)
            node.go_on(fetched(*away.state), away.facts)
            del self._away[name]  # not before: a site that cannot be read must not begin anew
        else:
            node = self._make[name](None)  # which draws its own weights
        self._here[name] = node
        return node

    def here_first(self, names: Iterable[str]) -> list[str]:
        """Sort sites so that those in memory are asked before others take their places."""
        return sorted(names, key=lambda name: name not in self._here)

    def _put_away(self, name: str) -> None:
        self.swaps += 1
        node, kind = self._here[name], _kind(self._here[name])
        arrays, facts = node.midway()
        state = set_aside(node.folder / AWAY, self.swaps, arrays)  # where the disk is full, the site stays here
        del self._here[name], arrays
        self._away[name] = Away(kind, state, facts)
        self._spare = None if kind is None else (kind, node.learner.model)
        node.close()
        if self.swaps % self.most == 0:  # every time costs a fifth of a swap
            give_back()  # or what the C library keeps of each site adds up to more than the sites in memory


class Swapped:
    """A site by its name; whether it is in memory, the residents know."""

    def __init__(self, name: str, residents: Residents) -> None:
        self.name, self._residents = name, residents

    def greeting(self) -> Facts:
        """As the site's own."""
        return self._residents.node(self.name).greeting()

    def answer(self, ask: Ask) -> Reply:
        """As the site's own."""
        return self._residents.node(self.name).answer(ask)


class Kept:
    """Sites between two messages, by run, name and configuration; the ones asked longest ago make room."""

    def __init__(self) -> None:
        self._nodes: OrderedDict[tuple[str, ...], tuple[int, Node]] = OrderedDict()
        self.loads = 0

    def take(self, config: RunConfig, site: SiteConfig, run: str, folder: Path) -> Node:
        """Return the site as its last message left it; whoever takes it gives it back by `keep`, or it is gone."""
        number, node = self._nodes.pop(_key(config, site, run, folder), (-1, None))
        if node is not None and checkpoint.rounds(node.folder / "work")[-1:] == [number]:
            return node
        if node is not None:
            node.close()
        self.loads += 1
        node = make_node(config, site, run, folder)
        node.take_up()
        return node

    def keep(self, node: Node, number: int, most: int) -> None:
        """Keep a site that was put away under this number, and at most this many."""
        self._nodes[_key(node.config, node.site, node.folder.name, node.folder.parent)] = (number, node)
        while len(self._nodes) > most:
            self._nodes.popitem(last=False)[1][1].close()


def _kind(node: Node) -> str | None:
    """Name the kind of a site's model; None where another site cannot take it over.

    Frozen layers and adapters' bases are not in a site's state, and Opacus leaves its hooks in a model.
    """
    model = node.learner.model
    if node.site.privacy is not None or node.task_is_secret or (model.partial and not isinstance(model, FrozenEncoder)):
        return None
    return f"{type(model).__name__} {node.site.model_settings(node.config.train)}"


def _key(config: RunConfig, site: SiteConfig, run: str, folder: Path) -> tuple[str, ...]:
    return (run, str(folder), config.to_json(), site.model_dump_json())
