"""Predictions in fewer bytes, worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from fedstill.common.wire import WireError
from fedstill.common.wire.compression import pack, unpack

LOGITS = np.array([[-2.0, 0.0], [0.55, 3.1]], np.float32)


def test_eight_bits_count_from_the_least_to_the_largest() -> None:
    packed = pack({"logits": LOGITS, "bias": LOGITS}, "int8")
    assert packed["logits"].tolist() == [[0, 100], [128, 255]]  # steps of 5.1 / 255 = 0.02; 127.5 goes to even
    assert packed["logits.bounds"].tolist() == pytest.approx([-2.0, 3.1])
    assert packed["bias"] is LOGITS  # no prediction
    found = unpack(packed)
    assert list(found) == ["logits", "bias"]
    assert found["logits"].dtype == np.float32
    assert np.abs(found["logits"] - LOGITS).max() <= 0.01 + 1e-6


def test_half_precision_keeps_numbers_finite() -> None:
    packed = pack({"logits": np.array([[1e6, -1e6]], np.float32)}, "float16")
    assert packed["logits"].dtype == np.float16
    assert unpack(packed)["logits"].tolist() == [[65504.0, -65504.0]]


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
