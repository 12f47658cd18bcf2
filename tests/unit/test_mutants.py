"""The list of guards fits the code; that each one's tests fail without it, `make test-mutants` shows."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MUTANTS = tomllib.loads((ROOT / "tests/mutants/mutants.toml").read_text())["mutant"]


def test_every_guard_has_a_name_of_its_own_and_tests() -> None:
    assert len({mutant["name"] for mutant in MUTANTS}) == len(MUTANTS) > 100
    assert all(mutant["tests"] and mutant["old"] != mutant["new"] for mutant in MUTANTS)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant["name"])
def test_a_guard_stands_where_the_list_says_and_so_do_its_tests(mutant: dict[str, str]) -> None:
    text = (ROOT / mutant["file"]).read_text()
    assert text.count(mutant["old"]) == 1
    ast.parse(text.replace(mutant["old"], mutant["new"]))
    for test in mutant["tests"]:
        file, _, name = test.partition("::")
        assert not name or f"def {name.partition('[')[0]}(" in (ROOT / file).read_text()
