"""Arrays and facts as bytes: a head of plain values that describes the arrays, then their raw bytes.

Nothing on the wire can run code, and large arrays are not copied twice.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from fedstill.common.states import Arrays, State
from fedstill.common.wire.compression import MOST, restored_shape, shorten
from fedstill.common.wire.errors import WireError
from fedstill.common.wire.spool import Place

Facts = dict[str, Any]  # JSON values: numbers, strings, lists and tables of them
Packed = tuple[Facts, list[memoryview]]  # the head of a frame, and the arrays' bytes behind it

HEAD_LIMIT = 1 << 20  # bytes of a head as JSON; parsed it takes some 27 times the room
SIDES = 32  # of an array
DTYPES = {"float16", "float32", "float64", "int8", "uint8", "int16", "int32", "int64", "bool"}
_NAMES = {np.dtype(name): name for name in DTYPES}  # numpy takes microseconds to name a type
_TYPES = {name: dtype for dtype, name in _NAMES.items()}
_WIDTHS = {name: dtype.itemsize for dtype, name in _NAMES.items()}


def encode(arrays: State, facts: Facts) -> Packed:
    """Encode the head of a frame and the arrays' bytes after it, in order and without copying floats."""
    described, buffers = [], []
    for name, value in arrays.items():
        short, recipe = shorten(np.asarray(value, order="C"))
        dtype = _NAMES.get(short.dtype)
        if dtype is None:
            raise WireError(f"array {name!r} has type {short.dtype.name}, which does not travel")
        described.append([name, dtype, [*short.shape], recipe] if recipe else [name, dtype, [*short.shape]])
        buffers.append(short.data.cast("B") if short.size else memoryview(b""))  # numpy's own views take longer
    return {"arrays": described, **facts}, buffers


def parse(text: bytes) -> Facts:
    """Return the head that was written as JSON."""
    try:
        head = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise WireError(f"the head of a frame cannot be read: {type(error).__name__}") from None
    if not isinstance(head, dict):
        raise WireError("the head of a frame cannot be read: it is not a table")
    return head


def decode(head: Facts, body: memoryview) -> tuple[Arrays, Facts]:
    """Decode the arrays (views of `body`) and facts of a frame; refuse a head that does not match its body."""
    places, facts = describe(head, len(body))
    return views(body, places), facts


def views(body: memoryview, places: dict[str, Place]) -> Arrays:
    """Return the arrays that lie at these places of a body."""
    arrays: Arrays = {}
    for name, place in places.items():
        try:
            if place.recipe:
                array = place.made_of(np.frombuffer(body, place.dtype, place.count, place.start))
            else:
                array = np.ndarray(place.shape, _TYPES[place.dtype], body, place.start)
                if not body.readonly:
                    array.flags.writeable = False
        except (TypeError, ValueError, OverflowError, MemoryError) as error:
            raise WireError(f"array {name[:80]!r}: {str(error)[:500]}") from None
        arrays[name] = array
    return arrays


def describe(head: Facts, length: int) -> tuple[dict[str, Place], Facts]:
    """Return where each array lies in a body of this length, and the facts; refuse a head that does not match."""
    try:
        facts = dict(head)
        described = [
            (str(n), str(d), _sides(shape), tuple(recipe[0]) if recipe else ())
            for n, d, shape, *recipe in facts.pop("arrays")
        ]
    except (ValueError, TypeError, KeyError) as error:
        raise WireError(f"the head of a frame cannot be read: {type(error).__name__}") from None
    places: dict[str, Place] = {}
    at = in_ranges = 0
    for name, dtype, shape, recipe in described:
        if dtype not in DTYPES or name in places or min(shape, default=0) < 0:
            raise WireError(
                f"array {name[:80]!r} is described as {dtype[:20]} {shape}, which does not travel, or twice"
            )
        count = 1
        for side in shape:
            count *= side
        if count == 0 and math.prod(side or 1 for side in shape) >= 1 << 48:
            raise WireError(f"array {name[:80]!r} has a shape that no array can have")
        size = count * _WIDTHS[dtype]
        if at + size > length:
            raise WireError(f"array {name[:80]!r} is longer than its frame")
        try:
            places[name] = Place(dtype, restored_shape(dtype, shape, recipe) if recipe else shape, count, at, recipe)
        except (ValueError, TypeError) as error:
            raise WireError(f"array {name[:80]!r}: {str(error)[:500]}") from None
        in_ranges += places[name].shape[0] if recipe and recipe[0] == "range" else 0
        if in_ranges > MOST:  # a range takes only a few bytes: many of them would fill the memory
            raise WireError(f"the ranges of a frame stand for more than {MOST:,} numbers")
        at += size
    if at != length:
        raise WireError(f"a frame has {length - at} bytes that no array describes")
    return places, facts


def _sides(shape: Any) -> tuple[int, ...]:
    """Validate a shape received over the wire."""
    if not isinstance(shape, list) or len(shape) > SIDES:
        raise ValueError
    for side in shape:
        if type(side) is not int or abs(side) >= 1 << 48:
            raise ValueError
    return tuple(shape)


def size_of(arrays: State, facts: Facts) -> int:
    """Return the size in bytes of this content with its head as JSON: on a stream, heads are shorter."""
    head, buffers = encode(arrays, facts)
    return len(to_text(head)) + body_size(buffers)


def to_text(head: Facts) -> bytes:
    """Return a head as JSON."""
    return json.dumps(head, separators=(",", ":")).encode()


def body_size(buffers: list[memoryview]) -> int:
    """Return the size in bytes of the arrays behind a head."""
    return sum(map(len, buffers))


def chunks(head: bytes, buffers: list[memoryview], size: int) -> Iterator[bytes]:
    """Cut the buffers into messages of `size` bytes, the head added to the first, copying each byte once."""
    pending: list[bytes | memoryview] = [head]
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
