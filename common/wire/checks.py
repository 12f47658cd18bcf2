"""Checks that the server runs on a Reply before a method sees it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from fedstill.common.states import LazyState, State, blocks_of, differences, kinds_of, shapes_of
from fedstill.common.wire.encoding import Facts
from fedstill.common.wire.errors import WireError
from fedstill.common.wire.messages import Ask, Reply, items

LARGEST = 1e6  # no model has such a logit: it would dominate a mean


def predictions(rows: np.ndarray, classes: int) -> Callable[[Reply], None]:
    """Return a check for predictions: these rows, in this order, `classes` finite numbers each."""
    asked = items(rows)

    def check(reply: Reply) -> None:
        logits, sent = reply.arrays.get("logits"), reply.arrays.get("items")
        if logits is None or sent is None:
            raise WireError("predictions without `items` or `logits`")
        if not np.array_equal(sent, asked):
            raise WireError(f"predictions for other items than asked, or in another order; asked: {_few(rows)}")
        if logits.shape != (len(rows), classes):
            raise WireError(f"predictions of shape {logits.shape} instead of {(len(rows), classes)}")
        if logits.dtype.kind != "f" or (logits.size and np.abs(logits).max() > LARGEST):
            raise WireError(f"predictions must be fractions between -{LARGEST:,.0f} and {LARGEST:,.0f}")

    return check


def same_shapes(like: State) -> Callable[[Reply], None]:
    """Return a check for a model state: the names and shapes of `like`, floats where it has floats."""
    shapes, kinds = shapes_of(like), kinds_of(like)

    def check(reply: Reply) -> None:
        wrong = differences(shapes_of(reply.arrays), shapes)
        if wrong:
            raise WireError(f"{len(wrong)} arrays differ from the central model's: " + "; ".join(wrong[:8]))
        sent = kinds_of(reply.arrays)
        other = [name for name, kind in kinds.items() if sent.get(name, kind) != kind]
        if other:
            raise WireError(
                f"array {other[0]!r} has whole numbers where fractions are wanted, or fractions for whole ones"
            )

    return check


def class_counts(classes: int, name: str = "counts") -> Callable[[Reply], None]:
    """Return a check for class counts: an integer for each class, summing to the site's texts."""

    def check(reply: Reply) -> None:
        counts = reply.arrays.get(name)
        if counts is None or counts.shape != (classes,) or counts.dtype.kind != "i" or counts.min() < 0:
            raise WireError(f"class counts must be {classes} whole numbers from 0 up, got {counts}")
        if counts.sum() != reply.metrics.get("texts"):
            raise WireError(f"class counts {counts} do not add up to the site's {reply.metrics.get('texts')} texts")

    return check


def all_of(*checks: Callable[[Reply], None]) -> Callable[[Reply], None]:
    """Return a check that runs all of these, in order."""

    def check(reply: Reply) -> None:
        for inner in checks:
            inner(reply)

    return check


def shaped(shapes: Mapping[str, tuple[int, ...]]) -> Callable[[Reply], None]:
    """Return a check for arrays of these names and shapes, and no others."""

    def check(reply: Reply) -> None:
        sent = {name: value.shape for name, value in reply.arrays.items()}
        if sent != {name: tuple(shape) for name, shape in shapes.items()}:
            raise WireError(f"arrays {sent} instead of {dict(shapes)}")

    return check


def check_reply(ask: Ask, reply: Reply) -> None:
    """Refuse a Reply with numbers that are not finite, or that fails the Ask's check."""
    lazy = isinstance(reply.arrays, LazyState)
    for name in reply.arrays:
        blocks = blocks_of(reply.arrays, name) if lazy else (reply.arrays[name],)
        if not all(np.isfinite(block).all() for block in blocks):
            raise WireError(f"array {name!r} has NaN or infinite values")
    if ask.check is not None:
        ask.check(reply)


_SHOWN = {"epsilon", "delta", "left", "noise_multiplier", "clip", "predictions"}


def check_metrics(reply: Reply, greeting: Facts) -> None:
    """Refuse metrics that are not usable numbers, and a number of texts other than the site joined with."""
    metrics = reply.metrics
    if not _finite(metrics):
        raise WireError("its metrics have NaN or infinite values")
    if "texts" in metrics and "texts" in greeting and metrics["texts"] != greeting["texts"]:
        raise WireError(f"it joined with {greeting['texts']} texts and now says {str(metrics['texts'])[:40]}")
    for name in {"seconds", "loss", "texts"} & set(metrics):
        if isinstance(metrics[name], bool) or not isinstance(metrics[name], int | float):
            raise WireError(f"its metric {name!r} is missing or no number")
    privacy = metrics.get("privacy", {})
    if not isinstance(privacy, dict) or not all(n in _SHOWN and isinstance(v, int | float) for n, v in privacy.items()):
        raise WireError("what it says of its privacy is not a table of numbers")


def _finite(value: Any) -> bool:
    """Return whether all numbers in a JSON value are finite."""
    if isinstance(value, dict | list):
        return all(_finite(item) for item in (value.values() if isinstance(value, dict) else value))
    return not isinstance(value, float) or math.isfinite(value)


def _few(ids: np.ndarray) -> str:
    flat = ids.ravel()
    return f"{flat[:5].tolist()}{'...' if flat.size > 5 else ''} ({flat.size} items)"
