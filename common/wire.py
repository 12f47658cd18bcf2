"""Ask and Reply: what server and sites say to each other, and how it is packed.

The only file that knows Flower's records. On the stream an Ask or a Reply is one frame: a JSON head that describes
the arrays, then their raw bytes, so that nothing on the wire can run code and large arrays are not copied twice.
As a plain Flower message it is a RecordDict with one ArrayRecord and one ConfigRecord.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

Arrays = dict[str, np.ndarray]
Facts = dict[str, Any]  # JSON values: numbers, words, lists and tables of them

NARROW = "int64/32"  # eight-byte numbers that travel in four
MOST_RANGE = 1 << 24  # numbers that a range in a head may stand for
DTYPES = {"float16", "float32", "float64", "int8", "uint8", "int16", "int32", "int64", "bool"}


class WireError(ValueError):
    """Something that came over the wire cannot be used; the text says what and why."""


@dataclass(frozen=True)
class Ask:
    """A question to nodes: a verb, arrays and settings for all, `each` for a part per node, `to` for some of them."""

    verb: str
    arrays: Arrays = field(default_factory=dict)
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
    arrays: Arrays = field(default_factory=dict)
    metrics: Facts = field(default_factory=dict)


@dataclass(frozen=True)
class Failure:
    """Why a node's answer to an Ask is missing."""

    node: str
    reason: str


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

    return check


def same_shapes(like: Arrays) -> Callable[[Reply], None]:
    """The check of an Ask for a model state: the same names and shapes as `like`."""
    shapes = {name: value.shape for name, value in like.items()}

    def check(reply: Reply) -> None:
        wrong = [
            f"{name} {reply.arrays[name].shape if name in reply.arrays else 'missing'} instead of {shapes.get(name)}"
            for name in sorted(shapes.keys() | reply.arrays.keys())
            if name not in reply.arrays or reply.arrays[name].shape != shapes.get(name)
        ]
        if wrong:
            raise WireError(f"{len(wrong)} arrays differ from the central model's: " + "; ".join(wrong[:8]))

    return check


def check_reply(ask: Ask, reply: Reply) -> None:
    """Refuse a Reply with numbers that are not finite, or that is not what the Ask wanted."""
    for name, value in reply.arrays.items():
        if value.dtype.kind == "f" and not np.isfinite(value).all():
            raise WireError(f"array {name!r} has NaN or infinite values")
    if ask.check is not None:
        ask.check(reply)


def _few(ids: np.ndarray) -> str:
    flat = ids.ravel()
    return f"{flat[:5].tolist()}{'...' if flat.size > 5 else ''} ({flat.size} items)"


# --- frames --------------------------------------------------------------------------------------------------------


def encode(arrays: Arrays, facts: Facts) -> tuple[bytes, list[memoryview]]:
    """The JSON head of a frame and the arrays' bytes behind it, in order and without copying them.

    Whole numbers that count up evenly, such as the rows of a batch, are three numbers in the head; a rising choice
    among few, such as drawn rows, is a bit for each; others travel in four bytes where they fit.
    """
    described, buffers = [], []
    for name, value in arrays.items():
        value = np.asarray(value, order="C")
        if value.dtype.name not in DTYPES:
            raise WireError(f"array {name!r} has type {value.dtype.name}, which does not travel")
        if value.dtype == np.int64:
            evenly = _as_range(value)
            if evenly is not None:
                described.append([name, "range", evenly])
                continue
            marks = _as_marks(value)
            if marks is not None:
                described.append([name, "marks", [int(value[0]), marks.size]])
                buffers.append(marks.data)
                continue
            if value.size and -(1 << 31) <= value.min() <= value.max() < 1 << 31:
                described.append([name, NARROW, list(value.shape)])
                buffers.append(value.astype(np.int32).reshape(-1).view(np.uint8).data)
                continue
        described.append([name, value.dtype.name, list(value.shape)])
        buffers.append(value.reshape(-1).view(np.uint8).data)
    return json.dumps({"arrays": described, **facts}, separators=(",", ":")).encode(), buffers


def decode(head: bytes, body: memoryview) -> tuple[Arrays, Facts]:
    """The arrays (views of `body`) and facts of a frame; a head that does not fit its body is refused."""
    try:
        facts = json.loads(head)
        described = [(str(n), str(d), tuple(int(s) for s in shape)) for n, d, shape in facts.pop("arrays")]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise WireError(f"the head of a frame cannot be read: {type(error).__name__}") from None
    arrays: Arrays = {}
    at = 0
    for name, dtype, shape in described:
        if dtype == "range":
            arrays[name] = _from_range(name, shape)
            continue
        if dtype == "marks":
            arrays[name] = _from_marks(name, shape, body[at:])
            at += shape[1]
            continue
        narrow = dtype == NARROW
        dtype = "int32" if narrow else dtype
        if dtype not in DTYPES or any(side < 0 for side in shape):
            raise WireError(f"array {name!r} is described as {dtype} {shape}, which does not travel")
        count = 1
        for side in shape:
            count *= side
        size = count * np.dtype(dtype).itemsize
        if at + size > len(body):
            raise WireError(f"array {name!r} is longer than its frame")
        value = np.frombuffer(body, dtype=dtype, count=count, offset=at).reshape(shape)
        arrays[name] = value.astype(np.int64) if narrow else value
        at += size
    if at != len(body):
        raise WireError(f"a frame has {len(body) - at} bytes that no array describes")
    return arrays, facts


def _as_range(value: np.ndarray) -> tuple[int, ...] | None:
    """Start, stop and step of whole numbers that count evenly."""
    if value.ndim != 1 or not 2 <= value.size <= MOST_RANGE:
        return None
    start, step = int(value[0]), int(value[1]) - int(value[0])
    stop = start + step * value.size
    if step == 0 or max(abs(start), abs(stop)) >= 1 << 53 or not np.array_equal(value, np.arange(start, stop, step)):
        return None
    return (start, stop, step)


def _from_range(name: str, described: tuple[int, ...]) -> np.ndarray:
    if len(described) != 3 or described[2] == 0 or max(map(abs, described)) >= 1 << 53:
        raise WireError(f"array {name!r} is described as the range {described}, which is none")
    if len(range(*described)) > MOST_RANGE:
        raise WireError(f"array {name!r} is a range of more than {MOST_RANGE:,} numbers")
    return np.arange(*described, dtype=np.int64)


def _as_marks(value: np.ndarray) -> np.ndarray | None:
    """A bit for every number from the first to the last of a rising list, where that is shorter than the list."""
    if value.ndim != 1 or value.size < 2 or not (value[1:] > value[:-1]).all():
        return None
    first, width = int(value[0]), int(value[-1]) - int(value[0]) + 1
    if width > 8 * value.size or abs(first) >= 1 << 53:
        return None
    marks = np.zeros(width, np.uint8)
    marks[value - first] = 1
    return np.packbits(marks)


def _from_marks(name: str, described: tuple[int, ...], body: memoryview) -> np.ndarray:
    if len(described) != 2 or abs(described[0]) >= 1 << 53 or not 0 < described[1] <= len(body):
        raise WireError(f"array {name!r} is described as the marks {described}, which its frame does not hold")
    return described[0] + np.flatnonzero(np.unpackbits(np.frombuffer(body[: described[1]], np.uint8)))


# --- Flower's records ----------------------------------------------------------------------------------------------


def to_records(arrays: Arrays, facts: Facts) -> RecordDict:
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


def size_of(arrays: Arrays, facts: Facts) -> int:
    """How many bytes a frame with this content has."""
    head, buffers = encode(arrays, facts)
    return len(head) + sum(len(buffer) for buffer in buffers)


def payload(arrays: Arrays) -> int:
    """How many of them are the arrays' own."""
    return sum(len(buffer) for buffer in encode(arrays, {})[1])


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
