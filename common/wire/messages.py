"""Ask and Reply: what server and sites say to each other."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from fedstill.common.states import State
from fedstill.common.wire.encoding import Facts, Packed, encode


@dataclass(frozen=True)
class Ask:
    """A question to nodes: a verb, arrays and settings for all, `each` for a part per node, `to` for some of them."""

    verb: str
    arrays: State = field(default_factory=dict)
    settings: Facts = field(default_factory=dict)
    each: Mapping[str, Facts] = field(default_factory=dict)
    to: tuple[str, ...] | None = None
    check: Callable[[Reply], None] | None = None  # stays with the asker: what a usable Reply looks like
    optional: bool = False  # too few answers do not end the run

    def part_for(self, node: str, place: Facts | None = None) -> Ask:
        """What one node is told: the common part and its own, arrays among the latter joined to the arrays."""
        own = {**self.each.get(node, {}), **(place or {})}
        arrays = {name: value for name, value in own.items() if isinstance(value, np.ndarray)}
        settings = {name: value for name, value in own.items() if not isinstance(value, np.ndarray)}
        return Ask(self.verb, {**self.arrays, **arrays}, {**self.settings, **settings})


@dataclass(frozen=True)
class Reply:
    """A node's answer."""

    node: str
    arrays: State = field(default_factory=dict)
    metrics: Facts = field(default_factory=dict)

    @cached_property
    def packed(self) -> Packed:
        """As it travels; encoded once for the limits, the ledger and the stream."""
        return encode(self.arrays, {"metrics": self.metrics})

    @property
    def size(self) -> int:
        """Bytes on the wire."""
        head, buffers = self.packed
        return len(head) + sum(len(buffer) for buffer in buffers)


@dataclass(frozen=True)
class Failure:
    """Why a node's answer to an Ask is missing."""

    node: str
    reason: str
    gone: bool = False  # late or lost: it is not asked again before the next round


def items(rows: np.ndarray) -> np.ndarray:
    """Eight bytes that stand for these rows in this order: every prediction carries them instead of a list of ids."""
    return np.frombuffer(hashlib.blake2b(np.asarray(rows, "<i8").tobytes(), digest_size=8).digest(), np.uint8)
