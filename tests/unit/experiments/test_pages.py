"""The evidence on the pages of docs/results is what the published scores give."""

from __future__ import annotations

import re

import pytest

from fedstill.experiments.compare.pages import PAGES, PICTURES, filled

SCREEN = "experiments/screen/methods.toml"


@pytest.mark.parametrize("page", sorted(path.name for path in PAGES.glob("*.md")))
def test_a_page_shows_what_its_published_scores_give(page: str) -> None:
    text = (PAGES / page).read_text(encoding="utf-8")
    assert filled(text) == text, "the scores or the page have changed: make results-pages"
    for name in re.findall(r"\.\./pictures/(forest-[a-z-]+\.png)", text):
        assert (PICTURES / name).exists()


def test_a_block_is_replaced_and_the_words_around_it_stay() -> None:
    old = f"Before.\n\n<!-- claim {SCREEN} interaction -->\n\nOutdated.\n\n<!-- end -->\n\nBehind.\n"
    new = filled(old)
    assert new.startswith(f"Before.\n\n<!-- claim {SCREEN} interaction -->\n\n")
    assert new.endswith("\n\n<!-- end -->\n\nBehind.\n")
    assert "Outdated" not in new
    row = next(line for line in new.splitlines() if line.startswith("| Amazon, a domain for every two sites |"))
    assert row.split(" | ")[1:4] == ["MHAT", "+0.53 ± 0.71", "0.137"]  # as tested when its 280 runs were made
    assert filled(new) == new


def test_an_unknown_claim_is_named() -> None:
    with pytest.raises(SystemExit, match=f"{SCREEN} has no claim 'interactoin'; it has ours, "):
        filled(f"<!-- claim {SCREEN} interactoin -->\n<!-- end -->")
