"""Ask and Reply: what server and sites say to each other, and how it is packed.

The only file that knows Flower's records. On the stream an Ask or a Reply is one frame: a JSON head that describes
the arrays, then their raw bytes, so that nothing on the wire can run code and large arrays are not copied twice.
As a plain Flower message it is a RecordDict with one ArrayRecord and one ConfigRecord.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from fedstill.common.numbers import MOST, restored_shape, shorten
from fedstill.common.states import Place, State, blocks_of, differences, kinds_of, shapes_of

Arrays = dict[str, np.ndarray]
Facts = dict[str, Any]  # JSON values: numbers, words, lists and tables of them

LARGEST = 1e6  # a logit beyond it is no model's: its mean with others' would be its own
SIDES = 32  # of an array
DTYPES = {"float16", "float32", "float64", "int8", "uint8", "int16", "int32", "int64", "bool"}


class WireError(ValueError):
    """Something that came over the wire cannot be used; the text says what and why."""


@dataclass(frozen=True)
class Ask:
    """A question to nodes: a verb, arrays and settings for all, `each` for a part per node, `to` for some of them."""

    verb: str
    arrays: State = field(default_factory=dict)
    settings: Facts = field(default_factory=dict)
    each: Mapping[str, Facts] = field(default_factory=dict)
    to: tuple[str, ...] | None = None
    check: Callable[[Reply], None] | None = None  # stays with the asker: what a usable Reply looks like

    def part_for(self, node: str) -> Ask:
        """What one node is told: the common part and its own, arrays among the latter joined to the arrays."""
        own = self.each.get(node, {})
        arrays = {name: value for name, value in own.items() if isinstance(value, np.ndarray)}
        settings = {name: value for name, value in own.items() if not isinstance(value, np.ndarray)}
        return Ask(self.verb, {**self.arrays, **arrays}, {**self.settings, **settings})


@dataclass(frozen=True)
class Reply:
    """A node's answer."""

    node: str
    arrays: State = field(default_factory=dict)
    metrics: Facts = field(default_factory=dict)


@dataclass(frozen=True)
class Failure:
    """Why a node's answer to an Ask is missing."""

    node: str
    reason: str
    gone: bool = False  # late or lost: it is not asked again before the next round


def items(rows: np.ndarray) -> np.ndarray:
    """Eight bytes that stand for these rows in this order: every prediction carries them instead of a list of ids."""
    return np.frombuffer(hashlib.blake2b(np.asarray(rows, "<i8").tobytes(), digest_size=8).digest(), np.uint8)


def predictions(rows: np.ndarray, classes: int) -> Callable[[Reply], None]:
    """The check of an Ask for predictions: these rows, in this order, `classes` finite numbers each."""
    asked = items(rows)

    def check(reply: Reply) -> None:
        logits, said = reply.arrays.get("logits"), reply.arrays.get("items")
        if logits is None or said is None:
            raise WireError("predictions without `items` or `logits`")
        if not np.array_equal(said, asked):
            raise WireError(f"predictions for other items than asked, or in another order; asked: {_few(rows)}")
        if logits.shape != (len(rows), classes):
            raise WireError(f"predictions of shape {logits.shape} instead of {(len(rows), classes)}")
        if logits.dtype.kind != "f" or (logits.size and np.abs(logits).max() > LARGEST):
            raise WireError(f"predictions must be fractions between -{LARGEST:,.0f} and {LARGEST:,.0f}")

    return check


def same_shapes(like: State) -> Callable[[Reply], None]:
    """The check of an Ask for a model state: the same names and shapes as `like`, fractions where it has fractions."""
    shapes, kinds = shapes_of(like), kinds_of(like)

    def check(reply: Reply) -> None:
        wrong = differences(shapes_of(reply.arrays), shapes)
        if wrong:
            raise WireError(f"{len(wrong)} arrays differ from the central model's: " + "; ".join(wrong[:8]))
        found = kinds_of(reply.arrays)
        other = [name for name, kind in kinds.items() if found.get(name, kind) != kind]
        if other:
            raise WireError(
                f"array {other[0]!r} has whole numbers where fractions are wanted, or fractions for whole ones"
            )

    return check


def class_counts(classes: int, name: str = "counts") -> Callable[[Reply], None]:
    """The check of an Ask for class counts: a whole number for each class, the sum being the site's texts."""

    def check(reply: Reply) -> None:
        counts = reply.arrays.get(name)
        if counts is None or counts.shape != (classes,) or counts.dtype.kind != "i" or counts.min() < 0:
            raise WireError(f"class counts must be {classes} whole numbers from 0 up, got {counts}")
        if counts.sum() != reply.metrics.get("texts"):
            raise WireError(f"class counts {counts} do not add up to the site's {reply.metrics.get('texts')} texts")

    return check


def all_of(*checks: Callable[[Reply], None]) -> Callable[[Reply], None]:
    """Every one of these checks, in order."""

    def check(reply: Reply) -> None:
        for one in checks:
            one(reply)

    return check


def shaped(shapes: Mapping[str, tuple[int, ...]]) -> Callable[[Reply], None]:
    """The check of an Ask for arrays of these names and shapes, and no others."""

    def check(reply: Reply) -> None:
        found = {name: value.shape for name, value in reply.arrays.items()}
        if found != {name: tuple(shape) for name, shape in shapes.items()}:
            raise WireError(f"arrays {found} instead of {dict(shapes)}")

    return check


def check_reply(ask: Ask, reply: Reply) -> None:
    """Refuse a Reply with numbers that are not finite, or that is not what the Ask wanted."""
    for name in reply.arrays:
        if not all(np.isfinite(block).all() for block in blocks_of(reply.arrays, name)):
            raise WireError(f"array {name!r} has NaN or infinite values")
    if ask.check is not None:
        ask.check(reply)


_WITH_LOSS = {"parameters", "ditto", "balanced", "mutual", "corrupted", "contrast"}
_SHOWN = {"epsilon", "delta", "left", "noise_multiplier", "clip", "predictions"}


def check_metrics(verb: str, reply: Reply, greeting: Facts) -> None:
    """Refuse metrics that a method could not calculate with: a site may change neither its size nor the form."""
    metrics, kind = reply.metrics, verb.partition(".")
    if not _finite(metrics):
        raise WireError("its metrics have NaN or infinite values")
    if "texts" in metrics and "texts" in greeting and metrics["texts"] != greeting["texts"]:
        raise WireError(f"it joined with {greeting['texts']} texts and now says {str(metrics['texts'])[:40]}")
    needed = ["texts"] if verb == "query.predictions" else []
    needed += ["loss"] if kind[0] == "train" and kind[2] in _WITH_LOSS else []
    for name in {"seconds", "loss", "texts"} & {*metrics, *needed}:
        if isinstance(metrics.get(name), bool) or not isinstance(metrics.get(name), int | float):
            raise WireError(f"its metric {name!r} is missing or no number")
    said = metrics.get("privacy", {})
    if not isinstance(said, dict) or not all(n in _SHOWN and isinstance(v, int | float) for n, v in said.items()):
        raise WireError("what it says of its privacy is not a table of numbers")


def _finite(value: Any) -> bool:
    """Whether all numbers in a JSON value are finite."""
    if isinstance(value, dict | list):
        return all(_finite(one) for one in (value.values() if isinstance(value, dict) else value))
    return not isinstance(value, float) or math.isfinite(value)


def _few(ids: np.ndarray) -> str:
    flat = ids.ravel()
    return f"{flat[:5].tolist()}{'...' if flat.size > 5 else ''} ({flat.size} items)"


# --- frames --------------------------------------------------------------------------------------------------------


def encode(arrays: State, facts: Facts) -> tuple[bytes, list[memoryview]]:
    """The JSON head of a frame and the arrays' bytes behind it, in order and without copying floats."""
    described, buffers = [], []
    for name, value in arrays.items():
        short, recipe = shorten(np.asarray(value, order="C"))
        if short.dtype.name not in DTYPES:
            raise WireError(f"array {name!r} has type {short.dtype.name}, which does not travel")
        described.append([name, short.dtype.name, list(short.shape), *([recipe] if recipe else [])])
        buffers.append(short.reshape(-1).view(np.uint8).data)
    return json.dumps({"arrays": described, **facts}, separators=(",", ":")).encode(), buffers


def decode(head: bytes, body: memoryview) -> tuple[Arrays, Facts]:
    """The arrays (views of `body`) and facts of a frame; a head that does not fit its body is refused."""
    places, facts = describe(head, len(body))
    return {name: _view(body, name, place) for name, place in places.items()}, facts


def describe(head: bytes, length: int) -> tuple[dict[str, Place], Facts]:
    """Where each array lies in a body of this length, and the facts; a head that does not fit is refused."""
    try:
        facts = json.loads(head)
        described = [
            (str(n), str(d), _sides(shape), tuple(recipe[0]) if recipe else ())
            for n, d, shape, *recipe in facts.pop("arrays")
        ]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise WireError(f"the head of a frame cannot be read: {type(error).__name__}") from None
    places: dict[str, Place] = {}
    at = told = 0
    for name, dtype, shape, recipe in described:
        if dtype not in DTYPES or name in places or any(side < 0 for side in shape):
            raise WireError(
                f"array {name[:80]!r} is described as {dtype[:20]} {shape}, which does not travel, or twice"
            )
        count = 1
        for side in shape:
            count *= side
        if count == 0 and math.prod(side or 1 for side in shape) >= 1 << 48:
            raise WireError(f"array {name[:80]!r} has a shape that no array can have")
        size = count * np.dtype(dtype).itemsize
        if at + size > length:
            raise WireError(f"array {name[:80]!r} is longer than its frame")
        try:
            places[name] = Place(dtype, restored_shape(dtype, shape, recipe) if recipe else shape, count, at, recipe)
        except (ValueError, TypeError) as error:
            raise WireError(f"array {name[:80]!r}: {str(error)[:500]}") from None
        told += places[name].shape[0] if recipe and recipe[0] == "range" else 0
        if told > MOST:  # a few bytes stand for a range: many of them would fill the memory
            raise WireError(f"the ranges of a frame stand for more than {MOST:,} numbers")
        at += size
    if at != length:
        raise WireError(f"a frame has {length - at} bytes that no array describes")
    return places, facts


def _sides(shape: Any) -> tuple[int, ...]:
    """A shape that came over the wire, if it is one."""
    if not isinstance(shape, list) or len(shape) > SIDES:
        raise ValueError
    if any(type(side) is not int or abs(side) >= 1 << 48 for side in shape):
        raise ValueError
    return tuple(shape)


def _view(body: memoryview, name: str, place: Place) -> np.ndarray:
    try:
        return place.made_of(np.frombuffer(body, place.dtype, place.count, place.start))
    except (ValueError, OverflowError, MemoryError) as error:
        raise WireError(f"array {name[:80]!r}: {str(error)[:500]}") from None


# --- Flower's records ----------------------------------------------------------------------------------------------


def to_records(arrays: State, facts: Facts) -> RecordDict:
    """The same content as a Flower RecordDict."""
    record = ArrayRecord({name: _to_array(value) for name, value in arrays.items()})
    return RecordDict({"arrays": record, "facts": ConfigRecord({"json": json.dumps(facts)})})


def from_records(content: RecordDict) -> tuple[Arrays, Facts]:
    """Arrays and facts of a RecordDict that `to_records` made."""
    try:
        facts = json.loads(str(content.config_records["facts"]["json"]))
        arrays = {name: _from_array(name, value) for name, value in content.array_records["arrays"].items()}
    except (KeyError, ValueError, TypeError) as error:
        raise WireError(f"a Flower message cannot be read: {error}") from None
    return arrays, facts


def _to_array(value: np.ndarray) -> Array:
    return Array(
        dtype=value.dtype.name, shape=tuple(value.shape), stype="raw", data=np.asarray(value, order="C").tobytes()
    )


def _from_array(name: str, value: Array) -> np.ndarray:
    head = json.dumps({"arrays": [[name, value.dtype, list(value.shape)]]}).encode()
    return decode(head, memoryview(value.data))[0][name]


def size_of(arrays: State, facts: Facts) -> int:
    """How many bytes a frame with this content has."""
    head, buffers = encode(arrays, facts)
    return len(head) + sum(len(buffer) for buffer in buffers)


def chunks(head: bytes, buffers: list[memoryview], prefix: bytes, size: int) -> Iterator[bytes]:
    """Cut the buffers into messages of `size` bytes, prefix and head on top of the first, copying each byte once."""
    pending: list[bytes | memoryview] = [prefix, head]
    room = size
    for buffer in buffers:
        at = 0
        while at < len(buffer):
            if room == 0:
                yield b"".join(pending)
                pending, room = [], size
            take = min(room, len(buffer) - at)
            pending.append(buffer[at : at + take])
            at += take
            room -= take
    yield b"".join(pending)
