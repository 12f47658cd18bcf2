"""Which parts of the server's model each site already holds in their current state."""

from __future__ import annotations

from collections.abc import Iterable

WHOLE = ("model",)


class Copies:
    """Parts that a site holds need not be sent again. A restarted site holds nothing."""

    def __init__(self, parts: Iterable[str] = WHOLE) -> None:
        self.parts = frozenset(parts)
        self._held: dict[str, frozenset[str]] = {}

    def lacks(self, site: str) -> frozenset[str]:
        """Return the parts that this site lacks."""
        return self.parts - self._held.get(site, frozenset())

    def lacking(self, sites: Iterable[str]) -> tuple[str, ...]:
        """Return the sites among these that lack anything."""
        return tuple(site for site in sites if self.lacks(site))

    def hold(self, site: str, but: Iterable[str] = ()) -> None:
        """Note that this site holds everything, except some parts."""
        self._held[site] = self.parts - frozenset(but)

    def lose(self, site: str, parts: Iterable[str] | None = None) -> None:
        """Note that this site may lack some parts, or all of them."""
        lost = self.parts if parts is None else frozenset(parts)
        self._held[site] = self._held.get(site, frozenset()) - lost

    def only(self, sites: Iterable[str]) -> None:
        """Note that the model has changed: only these sites have the new one."""
        self._held = dict.fromkeys(sites, self.parts)

    def holders(self) -> frozenset[str]:
        """Return the sites that lack nothing."""
        return frozenset(site for site in self._held if not self.lacks(site))
