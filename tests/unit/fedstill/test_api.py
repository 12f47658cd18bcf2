"""`import fedstill`: the public names, and that the import itself is quick."""

from __future__ import annotations

import subprocess
import sys

import pytest

import fedstill


def test_the_public_names_are_these() -> None:
    assert fedstill.__all__ == [
        "METHODS", "TASKS", "Ask", "Classifier", "ConfigError", "Federation", "Message", "Method", "Params", "Reply",
        "Result", "Round", "RunConfig", "Shield", "Task", "__version__", "load_run", "run", "site_verb",
    ]  # fmt: skip
    assert dir(fedstill) == sorted(fedstill.__all__)
    for name in fedstill.__all__:
        assert getattr(fedstill, name) is not None, name


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'runn'"):
        fedstill.runn  # noqa: B018


def test_the_import_itself_brings_neither_torch_nor_flower() -> None:
    code = "import fedstill, sys; print(sorted({'torch', 'flwr', 'transformers'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
