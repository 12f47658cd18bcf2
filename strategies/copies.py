"""Who holds what: which parts of the server's model each site has as they are at the server."""

from __future__ import annotations

from collections.abc import Iterable

WHOLE = ("model",)


class Copies:
    """What a site holds need not be sent again. A site that began anew holds nothing."""

    def __init__(self, parts: Iterable[str] = WHOLE) -> None:
        self.parts = frozenset(parts)
        self._held: dict[str, frozenset[str]] = {}

    def lacks(self, site: str) -> frozenset[str]:
        """The parts that this site would have to be sent."""
        return self.parts - self._held.get(site, frozenset())

    def lacking(self, sites: Iterable[str]) -> tuple[str, ...]:
        """Those among the sites that lack anything."""
        return tuple(site for site in sites if self.lacks(site))

    def hold(self, site: str, but: Iterable[str] = ()) -> None:
        """This site has everything, but for some parts."""
        self._held[site] = self.parts - frozenset(but)

    def lose(self, site: str, parts: Iterable[str] | None = None) -> None:
        """This site may lack some parts, or all of them."""
        lost = self.parts if parts is None else frozenset(parts)
        self._held[site] = self._held.get(site, frozenset()) - lost

    def only(self, sites: Iterable[str]) -> None:
        """The model has changed: these sites have the new one, and nobody else."""
        self._held = dict.fromkeys(sites, self.parts)

    def holders(self) -> frozenset[str]:
        """The sites that lack nothing."""
        return frozenset(site for site in self._held if not self.lacks(site))
