"""Many sites in one process: a bounded number of them in memory, the others put away on disk until they are asked.

There is one copy of a site at any time, in memory or on disk, so that none can be stale.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from fedstill.client.node import Node
from fedstill.common.wire import Ask, Facts, Reply


class Residents:
    """The sites in memory, least recently asked first; a site beyond `most` is put away before another is taken up."""

    def __init__(self, most: int, make: dict[str, Callable[[], Node]]) -> None:
        self.most, self._make = most, make
        self._here: OrderedDict[str, Node] = OrderedDict()
        self._away: set[str] = set()
        self._number = 0
        self.swaps = 0

    def node(self, name: str) -> Node:
        """Return a site, taken up from disk if it was put away."""
        if name in self._here:
            self._here.move_to_end(name)
            return self._here[name]
        while len(self._here) >= self.most:
            self._put_away(*self._here.popitem(last=False))
        node = self._make[name]()
        if name in self._away:
            node.take_up()
            self._away.remove(name)
        else:
            node.forget_work()  # what an earlier run left on disk is not this run's
        self._here[name] = node
        return node

    def _put_away(self, name: str, node: Node) -> None:
        self._number += 1
        self.swaps += 1
        node.put_away(self._number)
        self._away.add(name)


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
