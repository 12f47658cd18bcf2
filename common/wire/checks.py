"""Checks that the server runs on a Reply before a method sees it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from fedstill.common.states import LazyState, State, blocks_of, differences, kinds_of, shapes_of
from fedstill.common.wire.bounds import is_number
from fedstill.common.wire.encoding import Facts
from fedstill.common.wire.errors import WireError
from fedstill.common.wire.messages import Ask, Reply, items

LARGEST = 1e6  # no model has such a logit: it would dominate a mean
LARGEST_WEIGHT = 1e9  # nor such a weight: its square would overflow
LONGEST_STEP = (
    100.0  # times the central model's largest weight, or 1: no training moves one so far, and a mean would follow
)


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
    """Return a check for a model state: the names and shapes of `like`, floats where it has floats, and of its order.

    Without the last, one site's huge but finite weights carry the mean away, and honest sites break down on it.
    """
    shapes, kinds = shapes_of(like), kinds_of(like)
    most = LONGEST_STEP * max(1.0, largest_in(like))

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
        if (largest := largest_in(reply.arrays)) > most:
            raise WireError(f"a weight of {largest:.3g}; {most:.3g} is a hundred times the central model's largest")

    return check


def largest_in(state: State) -> float:
    """Return the largest absolute value among a state's fractions."""
    largest = 0.0
    for name in state:
        for block in blocks_of(state, name):
            if block.size and block.dtype.kind == "f":
                largest = max(largest, float(block.max()), -float(block.min()))
    return largest


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
        for block in blocks:
            if not np.isfinite(block).all():
                raise WireError(f"array {name[:80]!r} has NaN or infinite values")
            if block.size and block.dtype.kind == "f" and max(float(block.max()), -float(block.min())) > LARGEST_WEIGHT:
                raise WireError(f"array {name[:80]!r} has numbers beyond {LARGEST_WEIGHT:,.0f}")
    if ask.check is not None:
        ask.check(reply)


_SHOWN = {"epsilon", "delta", "left", "noise_multiplier", "clip", "predictions", "steps"}


def check_every_reply(reply: Reply, greeting: Facts) -> None:
    """Refuse what any Reply may hold beside its verb's parts, if it cannot be used; and a changed number of texts."""
    metrics = reply.metrics
    if not isinstance(metrics, dict):
        raise WireError("its metrics are not a table")
    if not is_number(metrics.get("seconds", 0.0)) or metrics.get("seconds", 0.0) < 0:
        raise WireError("its metric 'seconds' is no time")
    privacy = metrics.get("privacy", {})
    if not isinstance(privacy, dict) or not all(name in _SHOWN and is_number(v) for name, v in privacy.items()):
        raise WireError("what it says of its privacy is not a table of numbers")
    if "texts" in metrics and "texts" in greeting:
        texts = metrics["texts"]
        if type(texts) is not int or texts != greeting["texts"]:
            raise WireError(f"it joined with {greeting['texts']} texts and now says another number")


def _few(ids: np.ndarray) -> str:
    flat = ids.ravel()
    return f"{flat[:5].tolist()}{'...' if flat.size > 5 else ''} ({flat.size} items)"
