"""Typed messages: frozen dataclasses whose fields travel as the arrays and facts of an Ask or a Reply.

An `np.ndarray` field is an array of its name, a `State` field takes every other array, a `Facts` field every other
fact, a `Practice` field its own few facts; anything else is a fact of its name. What has its default does not travel.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, Self

import numpy as np

from fedstill.common.practice import Practice
from fedstill.common.states import State
from fedstill.common.wire.encoding import Facts
from fedstill.common.wire.errors import WireError

_MISSING = dataclasses.MISSING
_FIELDS: dict[type, tuple[Field, ...]] = {}


@dataclasses.dataclass(frozen=True)
class Field:
    """How one field of a message travels."""

    name: str
    kind: str  # array, state, facts, practice or fact
    types: tuple[Any, ...]
    default: Any
    key: str  # on the wire

    @property
    def is_tuple(self) -> bool:
        """Whether a list on the wire is a tuple here."""
        return any(typing.get_origin(kind) is tuple for kind in self.types)

    @property
    def required(self) -> bool:
        """Whether a message without it is refused."""
        return self.default is _MISSING


@dataclasses.dataclass(frozen=True)
class Message:
    """What one half of a method says to the other; subclasses are frozen dataclasses."""

    def to_wire(self) -> tuple[State, Facts]:
        """The arrays and facts of this message."""
        return to_wire(type(self), {field.name: getattr(self, field.name) for field in fields_of(type(self))})

    @classmethod
    def from_wire(cls, arrays: State, facts: Mapping[str, Any]) -> Self:
        """The message again; a WireError names what is missing, of the wrong type or not part of it."""
        check_parts(cls, arrays, facts)
        values: dict[str, Any] = {}
        named_arrays, named_facts = _keys(cls, "array"), _keys(cls, "fact")
        for field in fields_of(cls):
            if field.kind == "practice":
                values[field.name] = Practice.from_facts(facts)
            elif field.kind == "state":  # whole and as it is if it can be: a lazy state stays lazy
                rest = {name: arrays[name] for name in arrays if name not in named_arrays} if named_arrays else arrays
                values[field.name] = rest
            elif field.kind == "facts":
                values[field.name] = {key: value for key, value in facts.items() if key not in named_facts}
            elif field.key in (arrays if field.kind == "array" else facts):
                value = arrays[field.key] if field.kind == "array" else facts[field.key]
                values[field.name] = tuple(value) if field.is_tuple and value is not None else value
        return cls(**values)


def check_parts(kind: type[Message], arrays: State, facts: Mapping[str, Any]) -> None:
    """Refuse parts that are missing, of the wrong type or no part of this kind of message; no array is made."""
    fields = fields_of(kind)
    for field in fields:
        if field.kind not in ("array", "fact"):
            continue
        there: Mapping[str, Any] = arrays if field.kind == "array" else facts
        if field.key not in there:
            if field.required:
                raise WireError(f"{kind.__name__}: {field.key!r} is missing")
        elif field.kind == "fact" and not any(_fits(facts[field.key], wanted) for wanted in field.types):
            wanted = " or ".join(_called(one) for one in field.types)
            value = facts[field.key]
            raise WireError(
                f"{kind.__name__}: {field.key!r} is {type(value).__name__} {str(value)[:40]!r} where {wanted} is wanted"
            )
    kinds = {field.kind for field in fields}
    strange = undeclared(kind, arrays)
    if "facts" not in kinds:
        known = _keys(kind, "fact") | (frozenset(Practice.KEYS) if "practice" in kinds else frozenset())
        strange += [key for key in facts if key not in known]
    if strange:
        raise WireError(f"{kind.__name__}: {strange[0][:80]!r} is no part of it")


def undeclared(kind: type[Message], arrays: Iterable[str]) -> list[str]:
    """The names among these that are no array of this kind of message."""
    if any(field.kind == "state" for field in fields_of(kind)):
        return []
    return [name for name in arrays if name not in _keys(kind, "array")]


def to_wire(kind: type[Message], values: Mapping[str, Any]) -> tuple[State, Facts]:
    """Some fields of a message as arrays and facts, such as those that differ from site to site."""
    arrays: dict[str, np.ndarray] = {}
    facts: Facts = {}
    known = {field.name: field for field in fields_of(kind)}
    for name, value in values.items():
        field = known[name]
        if field.kind == "state":
            if not arrays and not _keys(kind, "array"):
                return value, _facts(kind, values)  # whole and as it is: a lazy state stays lazy
            arrays.update(value)
        elif field.kind == "array" and value is not None:
            arrays[field.key] = value
    return arrays, {**facts, **_facts(kind, values)}


def _facts(kind: type[Message], values: Mapping[str, Any]) -> Facts:
    facts: Facts = {}
    for field in fields_of(kind):
        if field.name not in values:
            continue
        value = values[field.name]
        if field.kind == "practice":
            facts.update(value.to_facts())
        elif field.kind == "facts":
            facts.update(value)
        elif field.kind == "fact" and (field.required or value != field.default):
            facts[field.key] = list(value) if isinstance(value, tuple) else value
    return facts


def fields_of(kind: type[Message]) -> tuple[Field, ...]:
    """How the fields of a message class travel, by their types."""
    if kind not in _FIELDS:
        hints = typing.get_type_hints(kind)
        _FIELDS[kind] = tuple(_field(field, hints[field.name]) for field in dataclasses.fields(kind))
    return _FIELDS[kind]


def _field(field: dataclasses.Field[Any], hint: Any) -> Field:
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    parts = typing.get_args(hint) if union else (hint,)
    kind = "fact"
    if np.ndarray in [typing.get_origin(part) or part for part in parts]:
        kind = "array"
    elif hint == State:
        kind = "state"
    elif hint == Facts:
        kind = "facts"
    elif hint is Practice:
        kind = "practice"
    default = field.default
    if field.default_factory is not _MISSING:
        default = field.default_factory()
    return Field(field.name, kind, parts, default, field.metadata.get("key", field.name))


def _keys(kind: type[Message], of: str) -> frozenset[str]:
    return frozenset(field.key for field in fields_of(kind) if field.kind == of)


def _called(kind: Any) -> str:
    if typing.get_origin(kind) is typing.Literal:
        return " or ".join(map(repr, typing.get_args(kind)))
    return str(getattr(kind, "__name__", kind))


def _fits(value: Any, kind: Any) -> bool:
    origin = typing.get_origin(kind) or kind
    if origin is typing.Literal:
        return value in typing.get_args(kind)
    if origin is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if origin is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if origin is tuple:
        return isinstance(value, list | tuple)
    if origin is types.NoneType:
        return value is None
    return origin is Any or isinstance(value, origin)


def named(key: str, **options: Any) -> Any:
    """A field that travels under another name than its own, such as `lambda`."""
    return dataclasses.field(metadata={"key": key}, **options)
