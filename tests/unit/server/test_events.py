"""events.jsonl: what the code writes and what server/events.py declares are the same, event by event, by fields."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from fedstill.server.events import ALWAYS, EVENTS

ROOT = Path(__file__).parents[3]
ROOMS = ("client", "common", "deploy", "experiments", "fedstill", "server", "strategies")
PASSED_ON = ("server/record.py", "server/federation.py", "server/link.py")  # whose kind of event is a parameter


class Written(NamedTuple):
    """One call that writes an event; `whole` if every field can be read off the call."""

    kind: str
    fields: frozenset[str]
    whole: bool
    where: str


def calls() -> Iterator[Written]:
    """Every call of event(...), progress(...), and of the links' notice(...)."""
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            for node in ast.walk(tree):
                if isinstance(node, ast.Call) and name_of(node) in ("event", "notice") and node.args:
                    yield from written(node, path.relative_to(ROOT))


def name_of(call: ast.Call) -> str:
    """`event` of record.event(...), `notice` of notice(...)."""
    function = call.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def written(call: ast.Call, path: Path) -> Iterator[Written]:
    """The event of a call; one whose kind is a parameter passes on what another call wrote."""
    kind, where = call.args[0], f"{path}:{call.lineno}"
    if not isinstance(kind, ast.Constant):
        assert str(path) in PASSED_ON, f"{where}: write the event's name as a string"
        return
    fields = {keyword.arg for keyword in call.keywords if keyword.arg}
    whole = len(fields) == len(call.keywords)
    if name_of(call) == "notice":
        facts = call.args[1]
        whole = isinstance(facts, ast.Dict) and None not in facts.keys
        if isinstance(facts, ast.Dict):
            fields = {str(key.value) for key in facts.keys if isinstance(key, ast.Constant)}
    elif isinstance(call.func, ast.Attribute) and ast.unparse(call.func.value) in ("fed", "self.fed"):
        fields.add("round")  # Federation.event adds it
    elif path.name == "federation.py" and ast.unparse(call.func) == "self.event":
        fields.add("round")
    yield Written(str(kind.value), frozenset(fields), whole, where)


def test_every_event_that_is_written_is_declared_and_the_other_way_round() -> None:
    found = list(calls())
    assert len(found) > 25  # the walk sees them
    undeclared = [f"{each.where}: {each.kind}" for each in found if each.kind not in EVENTS]
    assert undeclared == [], "declare these in server/events.py"
    assert set(EVENTS) - {each.kind for each in found} == set(), (
        "nothing writes these: take them out of server/events.py"
    )


def test_fields_are_the_declared_ones() -> None:
    for each in calls():
        event = EVENTS[each.kind]
        known = {*event.fields, *event.optional}
        assert each.fields <= known, f"{each.where}: {each.kind} writes {sorted(each.fields - known)}, undeclared"
        if each.whole:
            missing = set(event.fields) - each.fields
            assert not missing, f"{each.where}: {each.kind} does not write {sorted(missing)}"


def test_a_declaration_says_something() -> None:
    for name, event in EVENTS.items():
        assert event.meaning.endswith("."), name
        assert not {*event.fields} & {*event.optional}, name
        assert not {*ALWAYS} & {*event.fields, *event.optional}, name
