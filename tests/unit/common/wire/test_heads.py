"""Brief heads: a stream's second frame of a form takes a few bytes, says the same, and lies are refused."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedstill.common.wire import WireError, items
from fedstill.common.wire.frames import ASK, CHUNK, HELLO, MAGIC, REPLY, TEACHES, Frame, Memory, cut, join
from fedstill.common.wire.heads import (
    BRIEF,
    FORM_LIMIT,
    FORMS,
    ODD,
    Forms,
    filled,
    outlined,
    read_varint,
    squeeze,
    unsqueeze,
    varint,
)
from fedstill.common.wire.messages import with_items, without_items

NUMBERS = st.one_of(
    st.integers(-(1 << 62) + 1, (1 << 62) - 1), st.floats(), st.floats(width=32), st.floats(width=16), st.booleans(),
    st.none(), st.text(max_size=3),
)  # fmt: skip
TABLES = st.dictionaries(st.text(max_size=2), NUMBERS, max_size=2)
VALUES = st.one_of(NUMBERS, st.lists(NUMBERS, max_size=3), TABLES)
FACTS = st.dictionaries(st.sampled_from("abc"), VALUES, max_size=3)


def sent(frames: list[Frame]) -> list[bytes]:
    forms = Forms()
    return [message for frame in frames for message in cut(frame, forms)]


def read(messages: list[bytes], limit: int = 1 << 30) -> list[Frame]:
    return list(join(messages, limit, lambda size: None))


def bits(value: Any) -> Any:
    """A value in which NaN equals NaN, 0.0 is not -0.0 and 1 is not 1.0."""
    if isinstance(value, dict):
        return {key: bits(item) for key, item in value.items()}
    if isinstance(value, list):
        return [bits(item) for item in value]
    if isinstance(value, float):
        return "nan" if math.isnan(value) else struct.pack("<d", value)
    return (type(value), value)


@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.integers(0, 1 << 40), FACTS), max_size=8), st.sampled_from([ASK, REPLY]))
def test_any_sequence_of_heads_comes_back_bit_by_bit(said: list[tuple[int, dict[str, Any]]], kind: int) -> None:
    frames = [Frame(kind, number, {"x": np.arange(3.0)}, {"facts": facts}) for number, facts in said]
    found = read(sent(frames))
    assert [(f.kind, f.number, bits(f.facts)) for f in found] == [(f.kind, f.number, bits(f.facts)) for f in frames]
    assert all(f.arrays["x"].tolist() == [0, 1, 2] for f in found)


def batch(number: int, seconds: float = 0.25) -> Frame:
    logits = np.full((32, 2), number, np.float32)
    return Frame(REPLY, number, {"logits": logits}, {"metrics": {"texts": 500, "seconds": seconds}})


def test_the_head_of_a_batch_takes_three_bytes_once_its_form_is_known() -> None:
    """One for the form, two for the seconds; the number counts on by itself and the texts stay."""
    sizes = [len(message) - 256 for message in sent([batch(n, 0.25 + n / 1024) for n in range(5)])]
    assert sizes[0] > 15
    assert sizes[1] < 10  # the numbers that change are marked
    assert sizes[2:] == [3, 3, 3]


@pytest.mark.parametrize("change", [lambda message: message[:-4], lambda message: message + bytes(4)])
def test_shapes_that_were_checked_stand_only_for_bodies_of_their_length(change: Callable[[bytes], bytes]) -> None:
    messages = sent([batch(n) for n in range(5)])
    found = join([*messages[:4], change(messages[4])], 1 << 30, lambda size: None)
    assert [next(found).number for _ in range(4)] == [0, 1, 2, 3]
    with pytest.raises(WireError, match="array"):
        next(found)


def test_frames_of_one_form_share_nothing_that_can_be_changed() -> None:
    shapes = [(4, 2), (4, 2), (4, 2), (2, 4), (2, 4), (8,), (4, 2)]
    frames = [Frame(ASK, n, {"x": np.full(s, n, np.float32)}, {"settings": {"k": [7]}}) for n, s in enumerate(shapes)]
    for n, frame in enumerate(join(sent(frames), 1 << 30, lambda size: None)):
        assert frame.facts == {"settings": {"k": [7]}}
        assert frame.arrays["x"].tolist() == frames[n].arrays["x"].tolist()
        assert not frame.arrays["x"].flags.writeable
        frame.facts["settings"]["k"].append(8)


def test_rows_that_count_on_take_no_bytes_in_an_ask() -> None:
    asks = [
        Frame(ASK, n, {"rows": np.arange(32 * n, 32 * n + 32)}, {"verb": "x", "settings": {"step": n}})
        for n in range(1, 6)
    ]
    messages = sent(asks)
    assert [len(message) for message in messages[2:]] == [3, 3, 3]  # its form, and two bytes of a checksum
    assert [frame.arrays["rows"][0] for frame in read(messages)] == [32, 64, 96, 128, 160]


def test_an_ask_from_another_state_of_the_stream_is_noticed() -> None:
    """A lost frame would shift every row that follows; the checksum says so."""
    messages = sent([Frame(ASK, n, {"rows": np.arange(8 * n, 8 * n + 8)}, {"verb": "x"}) for n in range(6)])
    assert len(read(messages)) == 6
    with pytest.raises(WireError, match="out of step"):
        read(messages[:3] + messages[4:])


def test_frames_that_are_large_or_odd_travel_whole_and_teach_nothing() -> None:
    large = Frame(REPLY, 1, {"x": np.zeros(CHUNK + 1, np.uint8)}, {"metrics": {}})
    wordy = Frame(REPLY, 1, {}, {"metrics": {"words": "x" * FORM_LIMIT}})
    many = Frame(REPLY, 1, {}, {"metrics": {"losses": [0.5] * 100}})
    keyed = Frame(REPLY, 1, {}, {"metrics": {1: 2}})
    for frame in (large, wordy, many, keyed, Frame(HELLO, facts={"name": "a"})):
        messages = sent([frame, frame])
        assert all(m[:4] == MAGIC and not m[4] & TEACHES for m in (messages[0], messages[len(messages) // 2]))
        assert len(read(messages)) == 2


def test_a_stream_remembers_a_bounded_number_of_forms() -> None:
    frames = [Frame(REPLY, 1, {}, {"metrics": {f"name{n}": 1}}) for n in range(FORMS + 5)] * 2
    messages = sent(frames)
    assert sum(bool(m[0] < BRIEF and m[4] & TEACHES) for m in messages) == FORMS
    assert [f.facts for f in read(messages)] == [f.facts for f in frames]


def whole(head: bytes, kind: int, body: bytes = b"") -> bytes:
    packed = squeeze(head)
    return MAGIC + bytes([kind]) + varint(1) + varint(len(packed)) + varint(len(body)) + packed + body


TAUGHT = whole(b'{"arrays":[["a","uint8",[2]]],"metrics":{"x":1,"y":0.5}}', REPLY | TEACHES, b"12")


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (bytes([BRIEF | 1]), "has form 1, and this stream has 1"),
        (bytes([BRIEF | 63]), "has form 63"),
        (bytes([BRIEF | ODD]), "cut off"),
        (bytes([BRIEF | ODD, 0]), "marks numbers"),
        (bytes([BRIEF | ODD, 0x80]), "marks numbers"),
        (bytes([BRIEF | ODD, 1]), "cut off"),
        (bytes([BRIEF | ODD, 1]) + b"\xff" * 11, "cannot be read"),
        (bytes([BRIEF | ODD, 1]) + varint((1 << 64) - 1), "too large"),
        (bytes([BRIEF | ODD, 8, 3]) + b"123", "of 3 bytes"),
        (bytes([BRIEF | ODD, 8, 8]) + b"123", "cut off"),
        (bytes([BRIEF | ODD, 2]) + varint(1 << 41) + b"12", "longer than its frame"),
        (bytes([BRIEF]), "longer than its frame"),
        (bytes([BRIEF]) + b"123", "no array describes"),
        (bytes([BRIEF]) + bytes(2000), "more than the 1,000 allowed"),
        (TAUGHT, "known already"),
        (whole(b'{"arrays":[]}', HELLO | TEACHES), "teaches"),
        (whole(b'{"arrays":[],"x":"' + b"y" * FORM_LIMIT + b'"}', REPLY | TEACHES), "too large"),
        (whole(b'{"arrays":[],"x":[' + b"1," * 100 + b"1]}", REPLY | TEACHES), "no head can have"),
    ],
)  # fmt: skip
def test_brief_frames_that_lie_are_refused(message: bytes, reason: str) -> None:
    assert len(read([TAUGHT, bytes([BRIEF]) + b"34"], 1000)) == 2
    with pytest.raises(WireError, match=reason):
        read([TAUGHT, message], 1000)


def test_fuzzed_brief_frames_are_read_as_frames_or_refused() -> None:
    rng = np.random.default_rng(1)
    refused = 0
    for _ in range(5000):
        noise = bytes([BRIEF | int(rng.integers(128))]) + rng.bytes(int(rng.integers(0, 12)))
        try:
            [_, frame] = read([TAUGHT, noise], 1000)
        except WireError:
            refused += 1
        else:
            assert frame.kind == REPLY
            assert frame.arrays["a"].dtype == np.uint8
            assert set(frame.facts["metrics"]) == {"x", "y"}
    assert refused > 4000


def test_a_head_that_unpacks_to_more_than_is_allowed_is_refused() -> None:
    bomb = squeeze(b" " * (50 << 20))
    assert len(bomb) < 1 << 16
    with pytest.raises(WireError, match="more than the 1,048,576 bytes"):
        unsqueeze(bomb, 1 << 20)
    for broken in (bomb[:100], squeeze(b"{}") + b"x", b"", b"\xff\xff"):
        with pytest.raises(WireError):
            unsqueeze(broken, 1 << 30 if broken is not bomb[:100] else 1 << 20)


@given(st.integers(0, (1 << 64) - 1))
def test_short_numbers_come_back(number: int) -> None:
    assert read_varint(varint(number), 0) == (number, len(varint(number)))


def test_numbers_in_more_bytes_than_they_need_are_refused() -> None:
    for data in (b"\x80\x00", b"\xff" * 10, b"\x80", b""):
        with pytest.raises(WireError):
            read_varint(data, 0)


def test_outline_and_numbers_make_the_head_again() -> None:
    head = [7, {"a": [1, 2.5, "x", True, None, []], "b": {"c": 1}}]
    outline, numbers = outlined(head)
    assert numbers == [7, 1, 2.5, 1]
    assert filled(outline, iter(numbers)) == head


def test_items_of_the_rows_asked_need_not_be_said() -> None:
    rows, logits = np.array([3, 1, 2]), np.zeros((3, 2), np.float32)
    for answered, bytes_ in ((rows, 0), (rows[::-1], 8)):
        said = without_items({"rows": rows}, {"items": items(answered), "logits": logits})
        assert said["items"].nbytes == bytes_
        assert np.array_equal(with_items({"rows": rows}, said)["items"], items(answered))
    unasked = {"items": np.empty(0, np.uint8)}
    assert with_items({}, unasked)["items"].size == 0  # nothing stands for rows that nobody named


def test_the_memory_of_a_body_is_used_again_once_nobody_holds_its_arrays() -> None:
    memory = Memory()
    first = np.frombuffer(memory.take(1000), np.uint8)
    place = first.ctypes.data
    del first
    one = memory.take(900)
    assert np.frombuffer(one, np.uint8).ctypes.data == place
    value = np.frombuffer(one, np.uint8).reshape(30, 30)
    two = memory.take(1000)
    two[:3] = b"xyz"
    assert value.ravel()[:3].tobytes() != b"xyz"
