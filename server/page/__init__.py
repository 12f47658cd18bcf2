"""The look of a run: one style and one set of scripts for the live page and for the reports."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname


def asset(name: str) -> str:
    """Return a file of this folder as text; a Flower bundle carries only Python, so that the installed one is taken."""
    for folder in _folders():
        if (folder / name).is_file():
            return (folder / name).read_text(encoding="utf-8")
    raise FileNotFoundError(f"{name}: is not part of a Flower bundle; install the package fedstill")


def _folders() -> Iterator[Path]:
    yield Path(__file__).resolve().parent
    try:
        installed = importlib.metadata.distribution("fedstill")
    except importlib.metadata.PackageNotFoundError:
        return
    yield Path(str(installed.locate_file("fedstill/server/page")))
    source = json.loads(installed.read_text("direct_url.json") or "{}")
    if source.get("dir_info", {}).get("editable"):
        yield Path(url2pathname(urlsplit(source["url"]).path)) / "server/page"
