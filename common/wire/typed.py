"""Typed messages: frozen dataclasses whose fields travel as the arrays and facts of an Ask or a Reply.

An `np.ndarray` field is an array of its name, a `State` field takes every other array, a `Facts` field every other
fact, a `Practice` field its own few facts; any other field is a fact of its name. Defaults do not travel.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Self

import numpy as np

from fedstill.common.practice import Practice
from fedstill.common.states import State
from fedstill.common.wire.bounds import Meter
from fedstill.common.wire.encoding import Facts
from fedstill.common.wire.errors import WireError

_MISSING = dataclasses.MISSING
_JSON = {int, float, str, bool, list, dict, tuple}


@dataclasses.dataclass(frozen=True)
class Field:
    """How one field of a message travels."""

    name: str
    key: str  # on the wire
    kind: str  # array, state, facts, practice or fact
    default: Any
    required: bool
    wanted: str  # its types, in words; empty for any
    hint: Any  # its type
    is_tuple: bool


@dataclasses.dataclass(frozen=True)
class Form:
    """The parts of a kind of message, computed once."""

    fields: tuple[Field, ...]
    arrays: frozenset[str]  # by name; others only where there is a state
    facts: frozenset[str]
    any_array: bool
    any_fact: bool


@dataclasses.dataclass(frozen=True)
class Message:
    """A message between the two halves of a method; subclasses are frozen dataclasses."""

    _form: ClassVar[Form | None] = None

    def to_wire(self) -> tuple[State, Facts]:
        """Return the arrays and facts of this message."""
        return to_wire(type(self), self.__dict__)

    @classmethod
    def from_wire(cls, arrays: State, facts: Mapping[str, Any]) -> Self:
        """Build the message; a WireError names what is missing, of the wrong type or not part of it."""
        form, values = check_parts(cls, arrays, facts), dict[str, Any]()
        for field in form.fields:
            if field.kind == "array" and field.key in arrays:
                values[field.name] = arrays[field.key]
            elif field.kind == "fact" and field.key in facts:
                value = facts[field.key]
                values[field.name] = tuple(value) if field.is_tuple and value is not None else value
            elif field.kind == "practice":
                values[field.name] = Practice.from_facts(facts)
            elif field.kind == "state":  # unchanged if possible: a lazy state stays lazy
                named = form.arrays
                values[field.name] = {n: arrays[n] for n in arrays if n not in named} if named else arrays
            elif field.kind == "facts":
                values[field.name] = {key: value for key, value in facts.items() if key not in form.facts}
        return cls(**values)


def to_wire(kind: type[Message], values: Mapping[str, Any]) -> tuple[State, Facts]:
    """Return some fields of a message as arrays and facts, such as those that differ between sites."""
    arrays: State = {}
    facts: Facts = {}
    for field in (kind.__dict__.get("_form") or form_of(kind)).fields:
        if field.name not in values:
            continue
        value = values[field.name]
        if field.kind == "array" and value is not None:
            arrays = {**arrays, field.key: value}
        elif field.kind == "fact" and (field.required or value != field.default):
            facts[field.key] = list(value) if isinstance(value, tuple) else value
        elif field.kind == "practice":
            facts.update(value.to_facts())
        elif field.kind == "state":
            arrays = {**arrays, **value} if arrays else value
        elif field.kind == "facts":
            facts.update(value)
    return arrays, facts


def check_parts(kind: type[Message], arrays: State, facts: Mapping[str, Any]) -> Form:
    """Refuse parts that are missing, of the wrong type or unknown to this kind of message; no array is computed."""
    form: Form = kind.__dict__.get("_form") or form_of(kind)
    meter = Meter()
    for field in form.fields:
        parts: Mapping[str, Any] = arrays if field.kind == "array" else facts
        if field.kind not in ("array", "fact"):
            continue
        if field.key not in parts:
            if field.required:
                raise WireError(f"{kind.__name__}: {field.key!r} is missing")
        elif field.kind == "fact" and field.wanted:
            wrong = meter.wrong(facts[field.key], field.hint)
            if wrong is not None:
                raise WireError(f"{kind.__name__}: {field.key!r} is {wrong} where {field.wanted} is wanted")
    unknown = [] if form.any_array else [name for name in arrays if name not in form.arrays]
    others = [key for key in facts if key not in form.facts]
    if form.any_fact and (wrong := meter.wrong({key: facts[key] for key in others}, dict[str, float])):
        raise WireError(f"{kind.__name__}: it holds {wrong} where numbers by their names are wanted")
    unknown += [] if form.any_fact else others
    if unknown:
        raise WireError(f"{kind.__name__}: {unknown[0][:80]!r} is no part of it")
    return form


def undeclared(kind: type[Message], arrays: Iterable[str]) -> list[str]:
    """Return the names that are no array of this kind of message."""
    form = form_of(kind)
    return [] if form.any_array else [name for name in arrays if name not in form.arrays]


def form_of(kind: type[Message]) -> Form:
    """Return how the fields of a message class travel, by their types; an unsupported type fails here."""
    if kind.__dict__.get("_form") is None:
        hints = typing.get_type_hints(kind)
        fields = tuple(_field(field, hints[field.name]) for field in dataclasses.fields(kind))
        kinds = {field.kind for field in fields}
        facts = {field.key for field in fields if field.kind == "fact"}
        kind._form = Form(
            fields,
            frozenset(field.key for field in fields if field.kind == "array"),
            frozenset(facts | (set(Practice.KEYS) if "practice" in kinds else set())),
            "state" in kinds,
            "facts" in kinds,
        )
    form: Form = kind.__dict__["_form"]
    return form


def _field(field: dataclasses.Field[Any], hint: Any) -> Field:
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    parts = typing.get_args(hint) if union else (hint,)
    origins = [typing.get_origin(part) or part for part in parts]
    default = field.default
    if field.default_factory is not _MISSING:
        default = field.default_factory()
    kind = "array" if np.ndarray in origins else "fact"
    special: dict[Any, str] = {Practice: "practice"}
    if hint == State:
        kind = "state"
    elif hint == Facts:
        kind = "facts"
    elif hint in special:
        kind = special[hint]
    choices = tuple(
        value for part in parts if typing.get_origin(part) is typing.Literal for value in typing.get_args(part)
    )
    choices += (None,) if choices and types.NoneType in origins else ()
    known = any(one in _JSON for one in origins)
    wanted = " or ".join(map(repr, choices)) if choices else " or ".join(_called(part) for part in parts)
    return Field(
        field.name,
        field.metadata.get("key", field.name),
        kind,
        default,
        default is _MISSING,
        wanted if known or choices else "",
        hint,
        tuple in origins,
    )


def _called(kind: Any) -> str:
    return str(getattr(kind, "__name__", kind))


def named(key: str, **options: Any) -> Any:
    """Declare a field that travels under another name than its own, such as `lambda`."""
    return dataclasses.field(metadata={"key": key}, **options)
