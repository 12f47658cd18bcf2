"""How large a value from the wire may be, by its declared type: numbers that fit, short strings, short tables."""

from __future__ import annotations

import math
import types
import typing
from typing import Any

WHOLE = 1 << 63  # beyond any number of texts, any seed
LARGEST = 1e30  # far beyond any loss, score or second
LONGEST = 1000  # characters of a string
ITEMS = 50_000  # values in one message: the shapes of a large model are some thousands


class Meter:
    """Counts what a message holds; a message is refused once it holds more than ITEMS."""

    def __init__(self) -> None:
        self.left = ITEMS

    def wrong(self, value: Any, hint: Any) -> str | None:
        """Return what is wrong with a value for this type, in words that may be shown; None if it fits."""
        self.left -= 1
        if self.left < 0:
            return f"more than {ITEMS:,} values"
        origin = typing.get_origin(hint) or hint
        if origin in (typing.Union, types.UnionType):
            return self._any_of(value, typing.get_args(hint))
        if origin is typing.Literal:
            fits = any(type(value) is type(choice) and value == choice for choice in typing.get_args(hint))
            return None if fits else _shown(value)
        if hint is types.NoneType:
            return None if value is None else _shown(value)
        check = _SCALARS.get(origin)
        if check is not None:
            return None if check(value) else _shown(value)
        if origin in (list, tuple):
            return self._list(value, typing.get_args(hint))
        if origin is dict:
            return self._table(value, typing.get_args(hint))
        return None

    def _any_of(self, value: Any, hints: tuple[Any, ...]) -> str | None:
        found = [self.wrong(value, hint) for hint in hints]
        return None if None in found else found[0]

    def _list(self, value: Any, parts: tuple[Any, ...]) -> str | None:
        if not isinstance(value, list | tuple):
            return _shown(value)
        part = parts[0] if parts else float
        return next((wrong for item in value if (wrong := self.wrong(item, part)) is not None), None)

    def _table(self, value: Any, parts: tuple[Any, ...]) -> str | None:
        if not isinstance(value, dict):
            return _shown(value)
        part = parts[1] if len(parts) == 2 else float
        for key, item in value.items():
            if not is_name(key):
                return f"the name {str(key)[:40]!r}"
            if (wrong := self.wrong(item, part)) is not None:
                return wrong
        return None


def is_number(value: Any) -> bool:
    """Return whether a value is a number, finite and of a size that can be reckoned with."""
    if type(value) is int:
        return abs(value) <= LARGEST
    return isinstance(value, float) and math.isfinite(value) and abs(value) <= LARGEST


def is_name(value: Any) -> bool:
    """Return whether a value can be the name of a score or a parameter: short, and no control characters."""
    return isinstance(value, str) and 0 < len(value) <= 200 and value.isprintable() and not set(value) & set("<>[]")


_SCALARS: dict[Any, Any] = {
    int: lambda value: type(value) is int and abs(value) <= WHOLE,
    float: is_number,
    bool: lambda value: type(value) is bool,
    str: lambda value: isinstance(value, str) and len(value) <= LONGEST,
}


def _shown(value: Any) -> str:
    """A value in a few characters, however large or deep it is."""
    if isinstance(value, dict | list | tuple):
        return f"{type(value).__name__} of {len(value)}"
    if type(value) is int and abs(value) > WHOLE:
        return "int of more than 63 bits"
    return f"{type(value).__name__} {str(value)[:40]!r}"
