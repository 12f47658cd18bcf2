"""Named things: the built-in ones, and those that installed packages add through entry points."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from importlib.metadata import entry_points
from typing import Generic, TypeVar

T = TypeVar("T")


class Catalogue(Mapping[str, T], Generic[T]):
    """The built-in entries, then those of installed packages, which are loaded on first use."""

    def __init__(self, group: str, built_in: Mapping[str, T]) -> None:
        self.group, self._known = group, dict(built_in)
        self._built_in = frozenset(built_in)
        self._looked = False

    def load_installed(self) -> None:
        """Load the entry points. A package that fails is skipped with a warning: it must not stop a site."""
        if self._looked:
            return
        self._looked = True
        for entry in entry_points(group=self.group):
            try:
                loaded: T = entry.load()
            except Exception as error:
                warnings.warn(
                    f"{entry.value} ({self.group}) cannot be loaded: {error}; mend or uninstall it", stacklevel=2
                )
                continue
            if entry.name in self._built_in:
                warnings.warn(f"{entry.value} is called {entry.name!r} like a built-in one: left out", stacklevel=2)
                continue
            self._known[entry.name] = loaded

    def __getitem__(self, name: str) -> T:
        if name not in self._known:
            self.load_installed()
        return self._known[name]

    def __iter__(self) -> Iterator[str]:
        self.load_installed()
        return iter(self._known)

    def __len__(self) -> int:
        self.load_installed()
        return len(self._known)

    def __contains__(self, name: object) -> bool:
        if name not in self._known:
            self.load_installed()
        return name in self._known
