"""Packing of Asks and Replies: everything comes back as it was, and nothing that does not fit gets in."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedstill.common.wire import (
    Ask,
    Reply,
    WireError,
    check_reply,
    decode,
    encode,
    from_records,
    items,
    predictions,
    same_shapes,
    to_records,
)  # fmt: skip
from fedstill.common.wire.encoding import DTYPES, parse, to_text
from fedstill.common.wire.frames import (
    ASK,
    CHUNK,
    HELLO,
    REPLY,
    WINDOW,
    WINDOWS,
    Frame,
    cut,
    grpc_options,
    join,
    window,
)

ARRAYS = st.dictionaries(
    st.text(max_size=8),
    hnp.arrays(st.sampled_from(sorted(DTYPES)), hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)),
    max_size=3,
)


def flat(arrays: dict[str, np.ndarray], facts: dict[str, object]) -> tuple[dict[str, Any], memoryview]:
    head, buffers = encode(arrays, facts)
    return head, memoryview(b"".join(buffers))


def same(one: dict[str, np.ndarray], two: dict[str, np.ndarray]) -> bool:
    return list(one) == list(two) and all(
        a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
        for a, b in zip(one.values(), two.values(), strict=True)
    )


@given(ARRAYS)
def test_a_frame_gives_back_every_array_bit_by_bit(arrays: dict[str, np.ndarray]) -> None:
    facts = {"verb": "query.logits", "settings": {"h": 0.25, "names": ["a", "b"], "decay": None}}
    head, body = flat(arrays, facts)
    found, told = decode(parse(to_text(head)), body)
    assert same(arrays, found)
    assert told == facts


@pytest.mark.parametrize(
    ("rows", "bytes_"),
    [
        (np.arange(10_000), 0),  # whole numbers that count evenly are three numbers in the head
        (np.arange(40, 8, -4), 0),
        (np.array([3, 1, 2]), 12),
        (np.array([5, 6, 8, 20]), 2),  # a bit each from 5 to 20
        (np.array([5, 6, 8, 60]), 16),  # too far apart
        (np.array([1 << 40, 5]), 0),
        (np.array([7, 7, 1 << 40]), 24),
        (np.array([7, 7]), 8),
        (np.array([5]), 4),
        (np.array([[1, 2], [3, 4]]), 16),
    ],
)
def test_row_numbers_take_little_room_and_come_back(rows: np.ndarray, bytes_: int) -> None:
    head, body = flat({"rows": rows}, {})
    head = parse(to_text(head))
    assert len(body) == bytes_
    assert same({"rows": rows}, decode(head, body)[0])


@pytest.mark.parametrize(
    ("described", "body", "reason"),
    [
        (["int64", [0], ["range", 0, 1 << 40, 1]], b"", "cannot be made"),  # a few bytes for terabytes
        (["int64", [0], ["range", 0, 5, 0]], b"", "cannot be made"),
        (["int64", [0], ["range", 0, 5]], b"", "cannot be made"),
        (["int64", [0], ["range", 0, "5", 1]], b"", "cannot be made"),
        (["int64", [1], ["range", 0, 5, 1]], b"12345678", "cannot be made"),
        (["uint8", [1], ["marks", 0, 9]], b"a", "cannot be made"),
        (["uint8", [1], ["marks", 0, 2]], b"a", "3 numbers are marked, and 2 were announced"),
        (["uint8", [2], ["marks", 0, 3]], b"a", "longer than its frame"),
        (["float32", [1], ["int32"]], b"1234", "cannot be made"),
        (["int32", [1], ["sum"]], b"1234", "cannot be made"),
        (["int32", [1], [[]]], b"1234", "cannot be made"),
    ],
)
def test_recipes_that_make_no_numbers_are_refused(described: list[object], body: bytes, reason: str) -> None:
    with pytest.raises(WireError, match=reason):
        decode({"arrays": [["rows", *described]]}, memoryview(body))


@given(ARRAYS)
def test_flower_records_give_back_the_same(arrays: dict[str, np.ndarray]) -> None:
    arrays = {f"x{name}": value for name, value in arrays.items()}
    found, told = from_records(to_records(arrays, {"settings": {"epochs": 3}}))
    assert same(arrays, found)
    assert told == {"settings": {"epochs": 3}}


def test_types_that_hold_objects_do_not_travel() -> None:
    with pytest.raises(WireError, match="'x' has type object"):
        encode({"x": np.array([object()])}, {})
    head = {"arrays": [["x", "object", [1]]]}
    with pytest.raises(WireError, match="does not travel"):
        decode(head, memoryview(b"12345678"))


@pytest.mark.parametrize(
    ("arrays", "body", "reason"),
    [
        ([["x", "float32", [3]]], b"1234", "longer than its frame"),
        ([["x", "float32", [1]]], b"12345", "1 bytes that no array describes"),
        ([["x", "float32", [-1]]], b"", "does not travel"),
        ([["x", "float32", [2**40, 2**40]]], b"1234", "longer than its frame"),
        ([["x", "float32"]], b"", "cannot be read"),
        ("no list", b"", "cannot be read"),
    ],
)
def test_a_head_that_does_not_fit_its_body_is_refused(arrays: object, body: bytes, reason: str) -> None:
    with pytest.raises(WireError, match=reason):
        decode({"arrays": arrays}, memoryview(body))


@given(st.binary(max_size=200), st.binary(max_size=50))
def test_noise_is_refused_and_nothing_else_happens(head: bytes, body: bytes) -> None:
    with pytest.raises(WireError):
        decode(parse(head), memoryview(body))


@pytest.mark.parametrize("size", [0, 1, 1000, CHUNK - 100, CHUNK, 3 * CHUNK + 17])
def test_a_frame_of_any_size_is_cut_and_put_together(size: int) -> None:
    value = np.arange(size, dtype=np.uint8)
    messages = list(cut(Frame(ASK, 7, {"a": value, "b": np.float32(2.5).reshape(())}, {"verb": "x"})))
    assert all(len(message) <= CHUNK + 200 for message in messages)  # prefix and head ride on the first
    counted: list[int] = []
    frames = list(join([*messages, *messages], 1 << 30, counted.append))
    assert len(frames) == 2
    for frame in frames:
        assert (frame.kind, frame.number, frame.facts) == (ASK, 7, {"verb": "x"})
        assert np.array_equal(frame.arrays["a"], value)
        assert frame.arrays["b"].shape == ()
    assert sum(counted) == 2 * sum(map(len, messages))


def test_a_frame_over_the_limit_is_refused_before_it_is_read() -> None:
    messages = cut(Frame(REPLY, 1, {"a": np.zeros(3 * CHUNK, np.uint8)}))
    taken: list[int] = []
    with pytest.raises(WireError, match="more than the 1,048,576 allowed"):
        list(join(messages, CHUNK, taken.append))
    assert len(taken) == 1


@pytest.mark.parametrize("change", ["short", "magic", "kind", "cut", "extra"])
def test_a_stream_out_of_step_is_refused(change: str) -> None:
    messages = list(cut(Frame(HELLO, 0, {"a": np.zeros(2 * CHUNK, np.uint8)})))
    if change == "short":
        messages[0] = messages[0][:4]
    elif change == "magic":
        messages[0] = b"HTTP" + messages[0][4:]
    elif change == "kind":
        messages[0] = messages[0][:4] + b"\xff" + messages[0][5:]
    elif change == "cut":
        messages.pop()
    else:
        messages[1] += bytes(2 * CHUNK)
    with pytest.raises(WireError):
        list(join(messages, 1 << 30, lambda size: None))


@given(st.lists(st.binary(max_size=64), max_size=4))
def test_noise_on_the_stream_is_refused(messages: list[bytes]) -> None:
    if messages:
        with pytest.raises(WireError):
            list(join(messages, 1 << 20, lambda size: None))


def test_an_ask_gives_each_node_the_common_part_and_its_own() -> None:
    each = {"a": {"weight": 0.25, "mask": np.array([1, 0])}}
    ask = Ask("train.feedback", {"ensemble": np.zeros(2)}, {"h": 1.0}, each)
    part = ask.part_for("a")
    assert (sorted(part.arrays), part.settings) == (["ensemble", "mask"], {"h": 1.0, "weight": 0.25})
    assert ask.part_for("b").settings == {"h": 1.0}
    parts = ask.parts_for(("a", "b", "c"), {"round": 2})
    assert parts["a"].settings == {"h": 1.0, "weight": 0.25, "round": 2}
    assert parts["b"].settings == {"h": 1.0, "round": 2}
    assert parts["b"] is parts["c"]  # a link encodes it once


ROWS = np.array([4, 2, 9])


@pytest.mark.parametrize(
    ("arrays", "reason"),
    [
        ({"items": items(ROWS), "logits": np.zeros((3, 3))}, r"shape \(3, 3\) instead of \(3, 2\)"),
        ({"items": items(ROWS), "logits": np.zeros((2, 2))}, r"shape \(2, 2\)"),
        ({"items": items(ROWS[::-1]), "logits": np.zeros((3, 2))}, "other items than asked"),
        ({"items": items(ROWS[:2]), "logits": np.zeros((2, 2))}, "other items than asked"),
        ({"logits": np.zeros((3, 2))}, "without `items`"),
        ({"items": items(ROWS), "logits": np.array([[0, np.nan], [0, 0], [0, 0]])}, "NaN or infinite"),
        ({"items": items(ROWS), "logits": np.array([[0, np.inf], [0, 0], [0, 0]])}, "NaN or infinite"),
    ],
)
def test_predictions_that_cannot_be_used_say_why(arrays: dict[str, np.ndarray], reason: str) -> None:
    ask = Ask("query.logits", {"rows": ROWS}, check=predictions(ROWS, 2))
    with pytest.raises(WireError, match=reason):
        check_reply(ask, Reply("a", arrays))


def test_good_predictions_pass() -> None:
    ask = Ask("query.logits", {"rows": ROWS}, check=predictions(ROWS, 2))
    check_reply(ask, Reply("a", {"items": items(ROWS.copy()), "logits": np.zeros((3, 2), np.float32)}))


def test_a_state_of_other_names_or_shapes_is_refused_with_the_list() -> None:
    ask = Ask("train.local", check=same_shapes({"w": np.zeros((2, 2)), "b": np.zeros(2)}))
    check_reply(ask, Reply("a", {"w": np.ones((2, 2)), "b": np.ones(2)}))
    with pytest.raises(WireError, match=r"2 arrays differ.*b is missing; w has shape \(3, 2\) instead of \(2, 2\)"):
        check_reply(ask, Reply("a", {"w": np.ones((3, 2))}))


def test_a_state_of_another_order_than_the_central_model_is_refused() -> None:
    state = {"w": np.full((2, 2), 3.0), "steps": np.array([10_000])}
    ask = Ask("train.local", check=same_shapes(state))
    check_reply(ask, Reply("a", {"w": np.full((2, 2), -299.0), "steps": np.array([10_000])}))
    with pytest.raises(WireError, match="a weight of 301; 300 is a hundred times the central model's largest"):
        check_reply(ask, Reply("a", {"w": np.full((2, 2), -301.0), "steps": np.array([0])}))


def test_many_streams_share_what_a_few_would_have() -> None:
    assert window(1) == window(2) == WINDOW
    assert all(streams * window(streams) <= WINDOWS for streams in range(2, 17))
    assert window(1000) == CHUNK  # below one message a stream would stand still
    assert dict(grpc_options(20, 16))["grpc.http2.lookahead_bytes"] == 1 << 20
