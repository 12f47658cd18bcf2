"""Predictions in fewer bytes, worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from fedstill.common.wire import WireError
from fedstill.common.wire.compression import in_two_bytes, pack, unpack

LOGITS = np.array([[-2.0, 0.0], [0.55, 3.1]], np.float32)


def test_eight_bits_count_from_the_least_to_the_largest() -> None:
    packed = pack({"logits": LOGITS, "bias": LOGITS}, "int8")
    assert packed["logits"].tolist() == [[0, 100], [127, 255]]  # steps of 5.1015625 / 255, about 0.02
    assert packed["logits.bounds"].tolist() == [-2.0, 3.1015625]  # the next number up from 3.1 in half precision
    assert packed["bias"] is LOGITS  # no prediction
    found = unpack(packed)
    assert list(found) == ["logits", "bias"]
    assert found["logits"].dtype == np.float32
    assert np.abs(found["logits"] - LOGITS).max() <= 0.01 + 1e-6


def test_half_precision_keeps_numbers_finite() -> None:
    packed = pack({"logits": np.array([[1e6, -1e6]], np.float32)}, "float16")
    assert packed["logits"].dtype == np.float16
    assert unpack(packed)["logits"].tolist() == [[65504.0, -65504.0]]


def test_bounds_lie_outside_the_numbers_and_take_two_bytes_each_where_they_fit() -> None:
    rng = np.random.default_rng(1)
    for scale in (1e-9, 1e-3, 1.0, 100.0, 6e4, 65519.0, 1e6):
        value = (rng.uniform(-1, 1, (64, 2)) * scale).astype(np.float32)
        bounds = pack({"logits": value}, "int8")["logits.bounds"]
        assert bounds.dtype == (np.float16 if scale < 65504 else np.float32) or np.abs(value).max() < 65504
        assert bounds[0] <= value.min() <= value.max() <= bounds[1]


def test_a_time_keeps_three_digits_in_two_bytes() -> None:
    for seconds in (1e-3, 0.123456, 12.3456, 12345.6):
        assert in_two_bytes(seconds) == pytest.approx(seconds, rel=1e-3)
        assert np.float16(in_two_bytes(seconds)) == in_two_bytes(seconds)
    assert in_two_bytes(100_000.4) == 100_000.0


def test_numbers_that_are_not_finite_are_left_for_the_check_to_refuse() -> None:
    bad = np.array([[np.nan, 0.0]], np.float32)
    assert pack({"logits": bad}, "int8")["logits"] is bad


def test_equal_numbers_and_none_at_all() -> None:
    for value in (np.full((2, 2), 0.25, np.float32), np.empty((0, 2), np.float32)):
        assert np.array_equal(unpack(pack({"logits": value}, "int8"))["logits"], value)


def test_probabilities_keep_their_ends() -> None:
    corners = np.array([[0.0, 1.0], [1.0, 0.0]], np.float32)
    assert np.array_equal(unpack(pack({"targets": corners}, "int8"))["targets"], corners)


@pytest.mark.parametrize(
    ("value", "bounds"),
    [
        (np.zeros((1, 2), np.uint8), [np.nan, 1.0]),
        (np.zeros((1, 2), np.uint8), [1.0, 0.0]),
        (np.zeros((1, 2), np.uint8), [0.0]),
        (np.zeros((1, 2), np.int64), [0.0, 1.0]),
    ],
)
def test_bounds_that_make_no_sense_are_refused(value: np.ndarray, bounds: list[float]) -> None:
    with pytest.raises(WireError, match="eight bits between two bounds"):
        unpack({"logits": value, "logits.bounds": np.array(bounds, np.float32)})
