"""Predictions in fewer bytes: half precision, or eight bits between the least and the largest number."""

from __future__ import annotations

from typing import Literal

import numpy as np

from fedstill.common.states import State
from fedstill.common.wire import Arrays, WireError

Encoding = Literal["float32", "float16", "int8"]
PREDICTIONS = ("logits", "targets", "ensemble")  # the arrays that are predictions, whoever sends them
_BOUNDS = "{}.bounds"
_HALF = float(np.finfo(np.float16).max)


def pack(arrays: State, encoding: Encoding) -> State:
    """The predictions among the arrays, encoded; everything else as it is."""
    if encoding == "float32":
        return arrays
    packed: Arrays = {}
    for name, value in arrays.items():
        if name not in PREDICTIONS or not value.size or not np.isfinite(value).all():
            packed[name] = value
        elif encoding == "float16":
            packed[name] = np.clip(value, -_HALF, _HALF).astype(np.float16)
        else:
            low, high = np.float32(value.min()), np.float32(value.max())
            step = max(float(high) - float(low), float(np.finfo(np.float32).tiny)) / 255
            packed[name] = np.round((value.astype(np.float64) - low) / step).astype(np.uint8)
            packed[_BOUNDS.format(name)] = np.array([low, high], np.float32)
    return packed


def unpack(arrays: State) -> State:
    """What `pack` was given, as near as its encoding allows; whoever reads it need not know which that was."""
    if not any(name in arrays for name in PREDICTIONS):
        return arrays
    found: Arrays = {}
    for name, value in arrays.items():
        bounds = arrays.get(_BOUNDS.format(name))
        if name in PREDICTIONS and value.dtype == np.float16:
            found[name] = value.astype(np.float32)
        elif name in PREDICTIONS and bounds is not None:
            found[name] = _spread(name, value, bounds)
        elif not any(name == _BOUNDS.format(other) for other in PREDICTIONS):
            found[name] = value
    return found


def _spread(name: str, value: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    if value.dtype != np.uint8 or bounds.shape != (2,) or not np.isfinite(bounds).all() or bounds[0] > bounds[1]:
        raise WireError(f"array {name!r} is not eight bits between two bounds")
    low, high = float(bounds[0]), float(bounds[1])
    return (low + value.astype(np.float64) * ((high - low) / 255)).astype(np.float32)
