"""The documentation against the code, without building it: links, commands, targets, methods and keys exist."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pydantic import BaseModel
from typer.main import get_command

from fedstill.cli import app
from fedstill.common import config
from fedstill.strategies import METHODS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])
METHOD_PAGES = [path for path in sorted((DOCS / "methods").glob("*.md")) if "\nmethods: [" in path.read_text("utf-8")]
HEADINGS = [
    "Paper",
    "In one sentence",
    "Algorithm as run here",
    "What travels",
    "Parameters and presets",
    "Deviations from the paper and from the authors' code",
    "Cost",
]


@cache
def hook() -> ModuleType:
    """The mkdocs hook that writes the reference."""
    spec = importlib.util.spec_from_file_location("reference", DOCS / "hooks/reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def name_of(path: Path) -> str:
    """A page as the tests call it."""
    return str(path.relative_to(ROOT))


def without_code(text: str) -> str:
    """Prose alone."""
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE))


def code_of(text: str) -> Iterator[str]:
    """What a reader may type: shell blocks line by line, and code in a sentence."""
    blocks = re.findall(r"^ *```(\w*)\n(.*?)^ *```", text, flags=re.DOTALL | re.MULTILINE)
    for language, block in blocks:
        if language in ("", "sh", "bash"):
            yield from block.splitlines()
    prose = re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE)
    yield from (" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose))


def anchors(path: Path) -> set[str]:
    """The anchors of a page's headings, as mkdocs and GitHub make them."""
    found = re.findall(r"^#+ (.+)$", path.read_text("utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", title.lower())).strip("-") for title in found}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_inside_the_repository_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text("utf-8"))):
        if "://" in target or target.startswith("mailto:"):
            continue
        file, _, anchor = target.partition("#")
        goal = (page.parent / file).resolve() if file else page
        if goal.is_relative_to(DOCS) and str(goal.relative_to(DOCS)) in hook().PAGES:
            continue  # written when the site is built
        assert goal.exists(), f"{name_of(page)}: {target}"
        assert not anchor or anchor in anchors(goal), f"{name_of(page)}: {target}"


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), flags=re.MULTILINE))
    named = {
        (name_of(page), target)
        for page in PAGES
        for line in code_of(page.read_text("utf-8"))
        for target in re.findall(r"(?:^|&& )make ([a-z-]*[a-z])(?![a-z*-])", line.strip())
    }
    assert len(named) > 20
    assert [each for each in sorted(named) if each[1] not in targets] == []


def test_commands_exist() -> None:
    commands: dict[str, Any] = get_command(app).commands  # type: ignore[attr-defined]
    seen, wrong = 0, []
    for page in PAGES:
        for line in code_of(page.read_text("utf-8")):
            found = re.search(r"(?:^|coordinator |: )(?:\.venv/bin/)?fedstill ([a-z]+)(?: ([a-z]+))?", line.strip())
            if found is None:
                continue
            seen += 1
            group = commands.get(found[1])
            if group is None or (hasattr(group, "commands") and found[2] and found[2] not in group.commands):
                wrong.append(f"{name_of(page)}: {line}")
    assert seen > 40
    assert wrong == []


def test_options_of_fedstill_run_exist() -> None:
    known = {option for one in get_command(app).commands.values() for param in one.params for option in param.opts}  # type: ignore[attr-defined]
    for page in PAGES:
        for line in code_of(page.read_text("utf-8")):
            if re.match(r"(\.venv/bin/)?fedstill (run|resume|show|partition|compare|runs|superlink) ", line.strip()):
                typed = line.split(" #")[0]
                unknown = set(re.findall(r"(?<=\s)--[a-z-]+", typed)) - known
                assert not unknown, f"{name_of(page)}: {line}"


def built_in() -> dict[str, Any]:
    """The methods of this package, without those that other installed packages add."""
    return {name: method for name, method in METHODS.items() if method.__module__.startswith("fedstill.")}


def test_every_method_has_its_page_and_every_page_its_method() -> None:
    assert set(hook().method_pages()) == set(built_in())
    overview = (DOCS / "methods/index.md").read_text("utf-8")
    for name, page in hook().method_pages().items():
        assert re.search(rf"`{name}`[^|]*\]\({page}\)", overview), f"{name} is missing from docs/methods/index.md"


@pytest.mark.parametrize("page", METHOD_PAGES, ids=name_of)
def test_a_method_page_has_the_usual_headings_and_real_parameters(page: Path) -> None:
    text = page.read_text("utf-8")
    assert re.findall(r"^## (.+)$", text, flags=re.MULTILINE) == HEADINGS
    methods = [built_in()[name] for name, at in hook().method_pages().items() if at == page.name]
    known = {field.alias or name for m in methods for name, field in m.parameters.model_fields.items()}
    section = text.split("## Parameters and presets")[1].split("\n## ")[0]
    column = 2 if "| method |" in section else 1
    rows = [line.split("|") for line in section.splitlines() if line.startswith("| `")]
    for row in rows:
        named = re.findall(r"`(\w+)`", row[column])
        assert named, f"{name_of(page)}: {row}"
        assert set(named) <= known, f"{name_of(page)}: {set(named) - known} is no parameter"


def sections(kind: type[BaseModel]) -> Iterator[type[BaseModel]]:
    """A section of the configuration, and those inside it."""
    yield kind
    for field in kind.model_fields.values():
        for inner in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                yield from sections(inner)


def test_every_configuration_key_has_a_meaning() -> None:
    found = {kind for root in (config.RunConfig, config.SiteFile) for kind in sections(root)}
    assert len(found) > 10
    without = [
        f"{kind.__name__}.{name}" for kind in found for name in kind.model_fields if name not in hook().meanings(kind)
    ]
    assert without == [], "write a comment beside these keys: the reference is made from it"


def test_the_generated_reference_names_every_key_command_verb_and_event() -> None:
    from fedstill.server.events import EVENTS
    from fedstill.strategies import all_verbs

    pages = {name: write() for name, write in hook().PAGES.items()}
    for key in ("`rounds`", "`quorum`", "`partition`", "## [[sites]]"):
        assert key in pages["reference/configuration.md"]
    for command in get_command(app).commands:  # type: ignore[attr-defined]
        assert f"## fedstill {command}" in pages["reference/cli.md"]
    for verb in all_verbs().values():
        if verb.work.__module__.startswith("fedstill."):
            assert f"## {verb.name}\n" in pages["reference/verbs.md"]
    for event in EVENTS:
        assert f"## {event}\n" in pages["reference/events.md"]
    for method in built_in():
        assert f"## {method}\n" in pages["reference/parameters.md"]
