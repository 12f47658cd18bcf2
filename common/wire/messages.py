"""Ask and Reply: the messages between server and sites."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from fedstill.common.states import State
from fedstill.common.wire.encoding import Facts, to_text


@dataclass(frozen=True)
class Ask:
    """A question to nodes: a verb, arrays and settings for all, `each` with parts per node, `to` for some of them."""

    verb: str
    arrays: State = field(default_factory=dict)
    settings: Facts = field(default_factory=dict)
    each: Mapping[str, Facts] = field(default_factory=dict)
    to: tuple[str, ...] | None = None
    check: Callable[[Reply], None] | None = None  # stays with the asker: the check of a Reply
    optional: bool = False  # too few answers do not end the run
    sum: Any = None  # stays with the asker: a `Summed`, where the weighted sum of the answers suffices
    meanwhile: Callable[[], None] | None = None  # stays with the asker: what it does while the sites work
    room: int | None = None  # stays with the asker: most bytes of a Reply's arrays; None: what the link allows

    def part_for(self, node: str, place: Facts | None = None) -> Ask:
        """Return one node's Ask: the common part and its own, with arrays in the latter added to the arrays."""
        extra = {**self.each.get(node, {}), **(place or {})}
        arrays = {name: value for name, value in extra.items() if isinstance(value, np.ndarray)}
        settings = {name: value for name, value in extra.items() if not isinstance(value, np.ndarray)}
        return Ask(self.verb, {**self.arrays, **arrays}, {**self.settings, **settings}, room=self.room)

    def parts_for(self, nodes: Iterable[str], place: Facts) -> dict[str, Ask]:
        """Return each node's Ask; nodes without a part of their own share one, which a link encodes once."""
        shared = self.part_for("", place)
        return {node: self.part_for(node, place) if self.each.get(node) else shared for node in nodes}


@dataclass(frozen=True)
class Reply:
    """A node's answer."""

    node: str
    arrays: State = field(default_factory=dict)
    metrics: Facts = field(default_factory=dict)

    @cached_property
    def size(self) -> int:
        """The bytes of its arrays, and of its metrics as JSON: what the limits and the ledger count."""
        return sum(value.nbytes for value in self.arrays.values()) + len(to_text(self.metrics))


@dataclass(frozen=True)
class Failure:
    """Why a node did not answer an Ask."""

    node: str
    reason: str
    gone: bool = False  # late or lost: not asked again before the next round


def items(rows: np.ndarray) -> np.ndarray:
    """Return eight bytes that stand for these rows in this order: predictions carry them instead of a list of ids."""
    return np.frombuffer(hashlib.blake2b(np.asarray(rows, "<i8").tobytes(), digest_size=8).digest(), np.uint8)


BRIEF_BELOW = 1 << 20  # bytes of a Reply: in larger ones, eight more make no difference


def without_items(asked: State, arrays: State) -> State:
    """Return what travels of an answer: items that stand for the very rows that were asked need not be said."""
    rows, sent = asked.get("rows"), arrays.get("items")
    if rows is None or sent is None or sum(value.nbytes for value in arrays.values()) > BRIEF_BELOW:
        return arrays
    return {**arrays, "items": np.empty(0, np.uint8)} if np.array_equal(sent, items(rows)) else arrays


def with_items(asked: State, arrays: State) -> State:
    """Undo `without_items`, for the Ask that the answer is to."""
    if not isinstance(arrays, dict) or "rows" not in asked or "items" not in arrays or arrays["items"].size:
        return arrays
    return {**arrays, "items": items(asked["rows"])}
