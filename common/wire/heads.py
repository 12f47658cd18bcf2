"""Heads of frames in a few bytes: both ends of a stream remember the forms of its frames and send what is new.

A form is a head without its numbers. The first frame of a form travels whole and teaches it; the next ones name it
and send the numbers that the form does not foretell: whole numbers that do not go on counting as before (rows, steps
and shapes do), and fractions that change. Each end keeps its forms per stream and direction, so that a new connection
begins with none.
"""

from __future__ import annotations

import struct
import zlib
from operator import add
from typing import Any

from fedstill.common.wire.errors import WireError

FORMS = 64  # of one direction of a stream
FORM_LIMIT = 2048  # bytes of a head that can teach a form
SLOTS = 64  # numbers in such a head
BRIEF = 0x80  # the first byte of a frame that names its form: this, ODD if some number is sent, and the form
ODD = 0x40
CHECKED = 2  # bytes of a checksum, in forms that have one

_WHOLE, _FRACTION = 0, 1  # where a form has a number
_TABLE, _LIST, _CONSTANT = 2, 3, 4
_WIDTHS = {2: struct.Struct("<e"), 4: struct.Struct("<f"), 8: struct.Struct("<d")}
_OUT_OF_STEP = "the head of a frame is not what was sent: both ends of the stream are out of step"
_LARGEST = 1 << 62  # beyond it, two numbers may differ by more than 64 bits hold

# What heads mostly consist of, so that even a whole one is short. Both ends must have the same text.
_COMMON = (
    b'"mask":{"round":"step":"h":"lambda":"weight":"strength":"optimizer":"adamw","fresh":true,"decay":[0.0,1.0],'
    b'"dropout":false"distil":true,"loss":"soft","feedback":"scalar","settings":{"epochs":'
    b'"query.predictions"train.local"evaluate"train.feedback""query.logits","bool","int8","int16","int64",[0],["range",'
    b'"targets","answered","ensemble","float64","float16",[2]],["logits.bounds","float16",[2]]'
    b'{"verb":{"arrays":[["rows","int64",[0],["range",0,32,1]]],"verb":"query.logits","settings":{"round":1,"step":1}}'
    b'{"arrays":[],"metrics":{"texts":500,"loss":0.69,"losses":[0.,"seconds":0.001}}'
    b'{"arrays":[["items","uint8",[8]],["items","uint8",[0]],["logits","uint8",["float32",[32,2]]],'
    b'"metrics":{"texts":500,"seconds":0.0123456789}}'
)


class NoForm(Exception):
    """A head that teaches no form: too large, or of values that are not plain JSON."""


Layout = tuple[list[Any], int, Any]  # the numbers of a frame's arrays, the length of its body, and where they lie


class Form:
    """One form of heads on a stream, and what its next one probably holds."""

    def __init__(self, kind: int, outline: Any, numbers: list[Any], checked: bool) -> None:
        self.kind, self.outline, self.checked = kind, outline, checked
        self.facts, self.facts_at = _behind_arrays(outline)
        self.layout: Layout | None = None
        self.fractions = [type(number) is float for number in numbers]
        self.whole = not any(self.fractions)
        self.last = list(numbers)
        self.step = [0] * len(numbers)  # of whole numbers, from the last but one to the last
        self.width = [0] * len(numbers)  # bytes in which a fraction is sent every time; 0: it has not changed yet
        self.marks = -(-len(numbers) // 8)

    def write(self, numbers: list[Any]) -> tuple[bool, bytes]:
        """Return whether some number is marked and the bytes of these numbers, and remember them."""
        if self.whole and numbers == (foretold := list(map(add, self.last, self.step))):
            self.last = foretold
            return False, self._checksum() if self.checked else b""
        marks, odd, even = 0, b"", b""
        for place, number in enumerate(numbers):
            if not self.fractions[place]:
                if number != self.last[place] + self.step[place]:
                    marks |= 1 << place
                    odd += _varint(number - self.last[place])
                self.step[place], self.last[place] = number - self.last[place], number
                continue
            width, bits = self.width[place], _exactly(number, self.width[place])
            if width == 0 and _double(number) == _double(self.last[place]):
                continue
            if width == 0 or bits is None:
                marks |= 1 << place
                self.width[place], bits = _narrowest(number, width)
                odd += bytes([self.width[place]]) + bits
            else:
                even += bits
            self.last[place] = number
        check = self._checksum() if self.checked else b""
        return bool(marks), check + (marks.to_bytes(self.marks, "little") + odd if marks else b"") + even

    def read(self, data: memoryview, at: int, odd: bool) -> tuple[list[Any], int]:
        """Return the numbers that `write` wrote from `at` on, and where they end."""
        begin, marks = at, 0
        at += CHECKED if self.checked else 0
        if self.whole and not odd:
            self.last = list(map(add, self.last, self.step))
            if self.checked and data[begin:at] != self._checksum():
                raise WireError(_OUT_OF_STEP)
            if max(self.last, default=0) >= _LARGEST or min(self.last, default=0) <= -_LARGEST:
                raise WireError("a number in the head of a frame is too large")
            return list(self.last), at
        if odd:
            marks, at = int.from_bytes(_taken(data, at, self.marks), "little"), at + self.marks
            if not marks or marks >> len(self.last):
                raise WireError("a frame marks numbers that its form does not have")
        later = []
        for place, fraction in enumerate(self.fractions):
            marked = marks >> place & 1
            if not fraction:
                number = self.last[place] + self.step[place]
                if marked:
                    change, at = _from_varint(data, at)
                    number = self.last[place] + change
                if not -_LARGEST < number < _LARGEST:
                    raise WireError("a number in the head of a frame is too large")
                self.step[place], self.last[place] = number - self.last[place], number
            elif marked:
                self.width[place], at = _taken(data, at, 1)[0], at + 1
                self.last[place], at = self._fraction(data, at, place)
            elif self.width[place]:
                later.append(place)
        for place in later:
            self.last[place], at = self._fraction(data, at, place)
        if self.checked and _taken(data, begin, CHECKED) != self._checksum():
            raise WireError(_OUT_OF_STEP)
        return list(self.last), at

    def _fraction(self, data: memoryview, at: int, place: int) -> tuple[float, int]:
        width = self.width[place]
        if width not in _WIDTHS:
            raise WireError(f"a number of {width} bytes in the head of a frame")
        number: float = _WIDTHS[width].unpack(_taken(data, at, width))[0]
        return number, at + width

    def _checksum(self) -> bytes:
        return (zlib.crc32(repr(self.last).encode()) & 0xFFFF).to_bytes(CHECKED, "little")


class Forms:
    """The forms that one direction of a stream has taught, numbered in the order of their first frames."""

    def __init__(self) -> None:
        self._known: list[Form] = []
        self._by_outline: dict[Any, int] = {}

    def full(self) -> bool:
        """Return whether no more forms are remembered."""
        return len(self._known) >= FORMS

    def knows(self, kind: int, outline: Any) -> bool:
        """Return whether a form is known."""
        return (kind, outline) in self._by_outline

    def teach(self, kind: int, outline: Any, numbers: list[Any], checked: bool) -> None:
        """Remember the form of a head that travels whole."""
        self._by_outline[kind, outline] = len(self._known)
        self._known.append(Form(kind, outline, numbers, checked))

    def brief(self, kind: int, outline: Any, numbers: list[Any]) -> bytes | None:
        """Return the head of a frame whose form is known; None if it is not."""
        number = self._by_outline.get((kind, outline))
        if number is None:
            return None
        odd, written = self._known[number].write(numbers)
        return bytes([BRIEF | (ODD if odd else 0) | number]) + written

    def read(self, message: memoryview) -> tuple[Form, list[Any], int]:
        """Return the form of a brief frame, its numbers, and where its body begins."""
        number, odd = message[0] & (ODD - 1), bool(message[0] & ODD)
        if number >= len(self._known):
            raise WireError(f"a frame has form {number}, and this stream has {len(self._known)}")
        form = self._known[number]
        numbers, at = form.read(message, 1, odd)
        return form, numbers, at


def outlined(head: Any) -> tuple[Any, list[Any]]:
    """Return a head without its numbers, and the numbers in order; NoForm if it cannot be a form."""
    numbers: list[Any] = []
    return _outline(head, numbers), numbers


def _outline(value: Any, numbers: list[Any]) -> Any:
    kind = type(value)
    if kind is int:
        if not -_LARGEST < value < _LARGEST:
            raise NoForm
        numbers.append(value)
        return _WHOLE
    if kind is str:
        if len(value) > FORM_LIMIT:
            raise NoForm
        return value
    if kind is list or kind is tuple:
        if len(value) + len(numbers) > SLOTS:
            raise NoForm
        parts: list[Any] = [_LIST]
        for item in value:
            leaf = type(item)  # told apart in place, as in `filled`
            if leaf is str and len(item) <= FORM_LIMIT:
                parts.append(item)
            elif leaf is int and -_LARGEST < item < _LARGEST:
                numbers.append(item)
                parts.append(_WHOLE)
            else:
                parts.append(_outline(item, numbers))
        return tuple(parts)
    if kind is dict:
        if len(value) + len(numbers) > SLOTS:
            raise NoForm
        parts = [_TABLE]
        for key, item in value.items():
            if type(key) is not str or len(key) > FORM_LIMIT:
                raise NoForm
            leaf = type(item)
            if leaf is str and len(item) <= FORM_LIMIT:
                parts.append((key, item))
            elif leaf is int and -_LARGEST < item < _LARGEST:
                numbers.append(item)
                parts.append((key, _WHOLE))
            else:
                parts.append((key, _outline(item, numbers)))
        return tuple(parts)
    if isinstance(value, float):
        numbers.append(float(value))
        return _FRACTION
    if value is None or kind is bool:
        return (_CONSTANT, value)
    raise NoForm


def filled(outline: Any, numbers: Any) -> Any:
    """Return the head with this outline and these numbers."""
    # numbers and words are told apart in place: a call for each of them is most of what a small exchange takes
    shape = type(outline)
    if shape is int:
        return next(numbers)
    if shape is str:
        return outline
    if outline[0] == _TABLE:
        table = {}
        for key, part in outline[1:]:
            leaf = type(part)
            table[key] = next(numbers) if leaf is int else part if leaf is str else filled(part, numbers)
        return table
    if outline[0] == _CONSTANT:
        return outline[1]
    items = []
    for part in outline[1:]:
        leaf = type(part)
        items.append(next(numbers) if leaf is int else part if leaf is str else filled(part, numbers))
    return items


def _behind_arrays(outline: Any) -> tuple[Any, int]:
    """Return the outline of what is behind the arrays in [number, head], and which number is its first; 0 if the
    arrays are not what the head begins with."""
    head: tuple[Any, ...] = outline[2]
    if len(head) < 2 or head[1][0] != "arrays":
        return None, 0
    return (_TABLE, *head[2:]), 1 + _places(head[1][1])


def _places(outline: Any) -> int:
    """Return how many numbers an outline has places for."""
    if type(outline) is int:
        return 1
    if type(outline) is str or outline[0] == _CONSTANT:
        return 0
    return sum(_places(part[1] if outline[0] == _TABLE else part) for part in outline[1:])


def squeeze(text: bytes) -> bytes:
    """Return a whole head as it travels."""
    packer = zlib.compressobj(6, zlib.DEFLATED, -15, 8, zlib.Z_DEFAULT_STRATEGY, _COMMON)
    return packer.compress(text) + packer.flush()


def unsqueeze(data: bytes | memoryview, limit: int) -> bytes:
    """Undo `squeeze`; a text longer than `limit` is refused before it takes room."""
    unpacker = zlib.decompressobj(-15, _COMMON)
    try:
        text = unpacker.decompress(data, limit + 1)
    except zlib.error:
        raise WireError("the head of a frame cannot be read: it is not compressed as agreed") from None
    if len(text) > limit:
        raise WireError(f"the head of a frame has more than the {limit:,} bytes allowed")
    if not unpacker.eof or unpacker.unused_data:
        raise WireError("the head of a frame is cut off, or longer than it announced")
    return text


def varint(number: int) -> bytes:
    """Return a number from 0 up in as few bytes as it needs, seven bits each."""
    found = bytearray()
    while number >= 0x80:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    found.append(number)
    return bytes(found)


def read_varint(data: bytes | memoryview, at: int) -> tuple[int, int]:
    """Return the number of at most 64 bits that `varint` wrote, and where it ends."""
    number = 0
    for shift in range(0, 70, 7):
        byte = _taken(data, at, 1)[0]
        at += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            if number >> 64 or (byte == 0 and shift):
                break
            return number, at
    raise WireError("a number at the beginning of a frame cannot be read")


def _varint(number: int) -> bytes:
    return varint(number << 1 if number >= 0 else (-number << 1) - 1)


def _from_varint(data: memoryview, at: int) -> tuple[int, int]:
    number, at = read_varint(data, at)
    return (number >> 1 if not number & 1 else -(number + 1 >> 1)), at


def _taken(data: bytes | memoryview, at: int, count: int) -> bytes:
    part = bytes(data[at : at + count])
    if len(part) < count:
        raise WireError("the head of a frame is cut off")
    return part


def _double(number: float) -> bytes:
    return _WIDTHS[8].pack(number)


def _exactly(number: float, width: int) -> bytes | None:
    """Return a fraction in this many bytes, or None if it does not fit exactly."""
    if width == 0:
        return None
    if width == 8:
        return _double(number)
    try:
        bits = _WIDTHS[width].pack(number)
    except OverflowError:
        return None
    return bits if _WIDTHS[width].unpack(bits)[0] == number else None


def _narrowest(number: float, least: int) -> tuple[int, bytes]:
    for width in (2, 4):
        if width >= least and (bits := _exactly(number, width)) is not None:
            return width, bits
    return 8, _double(number)
