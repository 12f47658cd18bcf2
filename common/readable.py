"""Numbers, words and errors for people."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_TAG = re.compile(r"\[([a-zA-Z#/@][^\[\]]*)\]")  # what a terminal library would take for a style
_FLOWERS = re.compile(r"<class '[\w.]+'>:<['\"](.*)['\"]>", re.DOTALL)  # how Flower writes an app's error


def size(count: float) -> str:
    """Format bytes for people."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError


def duration(seconds: float) -> str:
    """Format seconds for people."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def plain(text: object, most: int = 2000) -> str:
    """Return words from outside as one line that styles no screen and marks up no page."""
    cut = str(text)[: 2 * most]
    shown = "".join(char if char.isprintable() else " " for char in cut)
    return _TAG.sub(r"(\1)", shown).replace("<", "\u2039").replace(">", "\u203a")[:most]


def sentence(reason: str) -> str:
    """Return an error that came through Flower as its text alone, on one line."""
    found = _FLOWERS.fullmatch(reason.strip())
    return " ".join((found[1] if found else reason).split())


def reason_of(error: BaseException) -> str:
    """Return an error as text; fedstill's own are sentences already, others are named by their class."""
    own = type(error).__module__.startswith("fedstill.")
    return str(error) if own else f"{type(error).__name__}: {error}"


def main_score(scores: Mapping[str, Any]) -> str:
    """Return a task's main score: its own metric beside accuracy, or the mean over all tasks if there are several."""
    if "mean_over_tasks" in scores:
        return "mean_over_tasks"
    others = (name for name in scores if not name.startswith(("accuracy", "semantic_distance")))
    return next(others, "accuracy")
