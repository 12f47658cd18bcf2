"""Fewer bytes on the wire: predictions in half precision or eight bits, row numbers in a few bytes."""

from __future__ import annotations

from typing import Literal

import numpy as np

from fedstill.common.states import Arrays, State
from fedstill.common.wire.errors import WireError

Encoding = Literal["float32", "float16", "int8"]
PREDICTIONS = ("logits", "targets", "ensemble")  # the arrays that are predictions, whoever sends them
_BOUNDS = "{}.bounds"
_HALF = float(np.finfo(np.float16).max)


def pack(arrays: State, encoding: Encoding) -> State:
    """Encode the predictions among the arrays; everything else stays as is."""
    if encoding == "float32":
        return arrays
    packed: Arrays = {}
    for name, value in arrays.items():
        if name not in PREDICTIONS or not value.size or not np.isfinite(value).all():
            packed[name] = value
        elif encoding == "float16":
            packed[name] = np.clip(value, -_HALF, _HALF).astype(np.float16)
        else:
            bounds = _bounds(value)
            low, high = float(bounds[0]), float(bounds[1])
            step = max(high - low, float(np.finfo(np.float32).tiny)) / 255
            packed[name] = np.round((value.astype(np.float64) - low) / step).astype(np.uint8)
            packed[_BOUNDS.format(name)] = bounds
    return packed


def _bounds(value: np.ndarray) -> np.ndarray:
    """Return a lower and an upper bound in two bytes each, or in four where two cannot hold them."""
    tight = np.array([value.min(), value.max()], np.float32)
    if np.abs(tight).max() >= _HALF:
        return tight
    bounds = tight.astype(np.float16)
    bounds[0] = np.nextafter(bounds[0], np.float16(-np.inf)) if bounds[0] > tight[0] else bounds[0]
    bounds[1] = np.nextafter(bounds[1], np.float16(np.inf)) if bounds[1] < tight[1] else bounds[1]
    return bounds if np.isfinite(bounds).all() else tight


def in_two_bytes(seconds: float) -> float:
    """Return a time with three digits, which a frame sends in two bytes; of a day and more, whole seconds."""
    return float(np.float16(seconds)) if seconds < _HALF else float(round(seconds))


def unpack(arrays: State) -> State:
    """Undo `pack`, as closely as its encoding allows; the reader need not know which one it was."""
    if not any(name in arrays for name in PREDICTIONS):
        return arrays
    unpacked: Arrays = {}
    for name, value in arrays.items():
        bounds = arrays.get(_BOUNDS.format(name))
        if name in PREDICTIONS and value.dtype == np.float16:
            unpacked[name] = value.astype(np.float32)
        elif name in PREDICTIONS and bounds is not None:
            unpacked[name] = _spread(name, value, bounds)
        elif not any(name == _BOUNDS.format(other) for other in PREDICTIONS):
            unpacked[name] = value
    return unpacked


def _spread(name: str, value: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    if value.dtype != np.uint8 or bounds.shape != (2,) or not np.isfinite(bounds).all() or bounds[0] > bounds[1]:
        raise WireError(f"array {name!r} is not eight bits between two bounds")
    low, high = float(bounds[0]), float(bounds[1])
    return (low + value.astype(np.float64) * ((high - low) / 255)).astype(np.float32)


# --- integers: rows would otherwise take more room than their predictions ---

Recipe = tuple[str | int, ...]  # how to rebuild the numbers from what travels; empty: they travel as they are
MOST = 1 << 24  # numbers that a range may stand for
_LONG = np.dtype(np.int64)
_EXACT = 1 << 53  # integers that JSON represents exactly


def shorten(value: np.ndarray) -> tuple[np.ndarray, Recipe]:
    """Return what travels for an array, and its recipe.

    Evenly spaced numbers, such as the rows of a batch, become three numbers in the recipe; an increasing choice among
    few, such as drawn rows, becomes one bit each; others use four bytes where they fit.
    """
    if value.dtype != _LONG or not value.size:
        return value, ()
    if value.ndim == 1 and 2 <= value.size <= MOST and abs(int(value[0])) < _EXACT > abs(int(value[-1])):
        start, step = int(value[0]), int(value[1]) - int(value[0])
        stop = start + step * value.size
        if step and abs(stop) < _EXACT and np.array_equal(value, np.arange(start, stop, step)):
            return np.empty(0, np.int64), ("range", start, stop, step)
        width = int(value[-1]) - start + 1
        if width <= 8 * value.size and (value[1:] > value[:-1]).all():
            marks = np.zeros(width, np.uint8)
            marks[value - start] = 1
            return np.packbits(marks), ("marks", start, value.size)
    if -(1 << 31) <= value.min() <= value.max() < 1 << 31:
        return value.astype(np.int32), ("int32",)
    return value, ()


def restored_shape(dtype: str, shape: tuple[int, ...], recipe: Recipe) -> tuple[int, ...]:
    """Return the shape that the recipe makes; raise ValueError if it makes none."""
    kind, *numbers = recipe
    whole = all(isinstance(number, int) and abs(number) < _EXACT for number in numbers)
    if kind == "range" and dtype == "int64" and shape == (0,) and whole and len(numbers) == 3 and numbers[2]:
        count = len(range(*map(int, numbers)))
        if 0 < count <= MOST:
            return (count,)
    if kind == "marks" and dtype == "uint8" and len(shape) == 1 and whole and len(numbers) == 2:
        count = int(numbers[1])
        if 0 < count <= 8 * shape[0]:
            return (count,)
    if kind == "int32" and dtype == "int32" and not numbers:
        return shape
    raise ValueError(f"{dtype} {shape} cannot be made into whole numbers by {list(recipe)}")


def restore(value: np.ndarray, recipe: Recipe) -> np.ndarray:
    """Rebuild the numbers; raise ValueError if there are more or fewer than the recipe says."""
    kind, *numbers = recipe
    if kind == "range":
        return np.arange(*map(int, numbers), dtype=np.int64)
    if kind == "int32":
        return value.astype(np.int64)
    start, count = int(numbers[0]), int(numbers[1])
    restored = start + np.flatnonzero(np.unpackbits(value)).astype(np.int64)
    if restored.size != count:
        raise ValueError(f"{restored.size} numbers are marked, and {count} were announced")
    return restored
