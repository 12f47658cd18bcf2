"""A verb's one declaration: what follows from it, and that leaving a part out fails at import."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from fedstill.common.practice import Practice
from fedstill.common.states import LazyState, State
from fedstill.common.wire import Facts, Reply, WireError
from fedstill.common.wire.typed import Message, named
from fedstill.strategies import METHODS, all_verbs
from fedstill.strategies.verbs import VERBS, Nothing, Verb, site_verb

ROOT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True)
class Order(Message):
    rows: np.ndarray
    epochs: int
    practice: Practice = Practice()
    strength: float = named("lambda", default=0.5)
    kind: Literal["soft", "hard"] = "soft"
    private: tuple[str, ...] = ()
    weights: State = named("weights", default_factory=dict)


def test_a_message_travels_as_arrays_and_facts_and_comes_back() -> None:
    order = Order(np.arange(3), 2, Practice(fresh=True, decay=(0.0, 0.5)), 0.7, private=("a*",),
                  weights={"w": np.ones(2)})  # fmt: skip
    arrays, facts = order.to_wire()
    assert set(arrays) == {"rows", "w"}
    assert facts == {"epochs": 2, "fresh": True, "decay": (0.0, 0.5), "lambda": 0.7, "private": ["a*"]}
    again = Order.from_wire(arrays, facts)
    assert (again.epochs, again.practice, again.strength, again.private) == (2, order.practice, 0.7, ("a*",))
    assert np.array_equal(again.rows, order.rows)
    assert list(again.weights) == ["w"]


def test_what_has_its_default_does_not_travel() -> None:
    assert Order(np.arange(3), 2).to_wire()[1] == {"epochs": 2}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"epochs": None}, "'epochs' is NoneType 'None' where int is wanted"),
        ({"epochs": True}, "'epochs' is bool 'True' where int is wanted"),
        ({"epochs": 2.5}, "'epochs' is float '2.5' where int is wanted"),
        ({"lambda": "much"}, "'lambda' is str 'much' where float is wanted"),
        ({"kind": "firm"}, "'kind' is str 'firm' where 'soft' or 'hard' is wanted"),
        ({"kindness": 1}, "'kindness' is no part of it"),
    ],
)
def test_a_message_that_is_not_as_declared_is_refused(change: Facts, reason: str) -> None:
    with pytest.raises(WireError, match=f"Order: {reason}"):
        Order.from_wire({"rows": np.arange(3)}, {"epochs": 2, **change})


def test_a_missing_part_is_named() -> None:
    with pytest.raises(WireError, match="Order: 'rows' is missing"):
        Order.from_wire({}, {"epochs": 2})


def test_a_state_that_is_read_array_by_array_stays_so() -> None:
    @dataclass(frozen=True)
    class Weights(Message):
        weights: State

    made: list[str] = []
    lazy = LazyState({"a": (2,), "b": (2,)}, lambda name: made.append(name) or np.zeros(2))  # type: ignore[func-returns-value]
    assert Weights(lazy).to_wire()[0] is lazy
    assert Weights.from_wire(lazy, {}).weights is lazy
    assert made == []


@pytest.mark.parametrize("part", ["leaves", "phase"])
def test_a_declaration_without_a_part_fails_at_import(part: str) -> None:
    declared: dict[str, Any] = {"leaves": "predictions", "phase": "voting"}
    del declared[part]
    with pytest.raises(TypeError, match=part):
        site_verb("query.nothing", **declared)


def test_a_function_without_message_types_fails_at_import() -> None:
    def untyped(site, message):  # type: ignore[no-untyped-def]
        return None

    def half(site: Any, message: Nothing):  # type: ignore[no-untyped-def]
        return None

    for function in (untyped, half):
        with pytest.raises(TypeError, match=r"verb query.nothing: write its function as"):
            site_verb("query.nothing", leaves="predictions", phase=None)(function)
    assert "query.nothing" not in VERBS


def test_names_are_kinds_of_flower_messages_and_given_once() -> None:
    def work(site: Any, message: Nothing) -> Nothing:
        return message

    for name in ("steal.texts", "train", "train."):
        with pytest.raises(ValueError, match=r"KIND.ACTION"):
            site_verb(name, leaves="weights", phase=None)(work)
    with pytest.raises(ValueError, match=r"two verbs are called 'train.local'"):
        site_verb("train.local", leaves="weights", phase=None)(work)


def test_every_verb_says_what_it_does_and_is_declared_where_its_method_is() -> None:
    for name, verb in all_verbs().items():
        assert isinstance(verb, Verb)
        assert verb.about.endswith("."), name
        assert verb.work.__module__.startswith("fedstill.strategies."), name


def test_a_reply_is_checked_by_the_declaration() -> None:
    VERBS["query.counts"].check(Reply("a", {"counts": np.zeros(2, np.int64)}, {"texts": 3, "seconds": 0.1}))
    with pytest.raises(WireError, match=r"ClassCounts: 'encoder.weight' is no part of it"):
        VERBS["query.counts"].check(
            Reply("a", {"counts": np.zeros(2, np.int64), "encoder.weight": np.zeros(2)}, {"texts": 3})
        )


def test_no_method_is_longer_than_it_can_be_read() -> None:
    long = {}
    for method in set(METHODS.values()):
        path = Path(str(__import__(method.__module__, fromlist=["x"]).__file__))
        long[path.name] = len(path.read_text().splitlines())
    shared = ("flower_rules.py",)  # six methods in one file
    assert {name: count for name, count in long.items() if count > 250 and name not in shared} == {}


def test_flowers_private_api_is_used_in_one_file_alone() -> None:
    public = {"flwr.app", "flwr.serverapp", "flwr.clientapp", "flwr.serverapp.strategy", "flwr.simulation"}
    used: dict[str, set[str]] = {}
    for room in ("client", "common", "deploy", "experiments", "fedstill", "server", "strategies"):
        for path in (ROOT / room).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                module = (node.module or "") if isinstance(node, ast.ImportFrom) else ""
                if module.split(".")[0] == "flwr" and module not in public:
                    used.setdefault(str(path.relative_to(ROOT)), set()).add(module)
    assert set(used) == {"deploy/flower_internals.py"}
