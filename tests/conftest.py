"""What the tests share: one thread a process, tiers by folder, and a run so small that it takes seconds."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", os.environ.get("FEDSTILL_TEST_THREADS", "1"))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fedstill.common.config import RunConfig
from fedstill.common.config.files import load_run
from fedstill.strategies import METHODS

torch.set_num_threads(int(os.environ.get("FEDSTILL_TEST_THREADS", "1")))  # make test-portable tries two
TESTS = Path(__file__).parent

SMALL = """
name = "small"
rounds = 2
[data]
private = 64
public = 40
labelled = 16
test = 24
[train]
learning_rate = 1e-3
max_length = 16
batch_size = 16
[method]
local_epochs = 1
schedule = "constant"
[central]
model = "tiny-bert"
[[sites]]
name = "north"
model = "tiny-bert"
[[sites]]
name = "south"
model = "tiny-roberta"
[exchange]
join_deadline = 120
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(Path(item.path).relative_to(TESTS).parts[0])
    if "PYTEST_XDIST_WORKER" in os.environ:
        items[:] = spread_out(items)


def spread_out(items: list[pytest.Item]) -> list[pytest.Item]:
    """Put the files of deploy tests evenly among the others: processes mostly wait for each other.

    At the end of the suite they would leave the cores idle, and one long file would keep everybody waiting.
    """
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    waiting = [group for path, group in files.items() if path.parent.name == "deploy" and path.parent.parent == TESTS]
    working = [group for group in files.values() if group not in waiting]
    share = len(working) / max(1, len(waiting))
    places = [(place, group) for place, group in enumerate(working)]
    places += [(number * share - 0.5, group) for number, group in enumerate(waiting)]
    return [item for _, group in sorted(places, key=lambda one: one[0]) for item in group]


@pytest.fixture
def small() -> Callable[..., RunConfig]:
    """A run of two sites and two rounds with `key=value` changes; rates are constant unless a preset says otherwise."""

    def made(*changes: str) -> RunConfig:
        config = load_run(SMALL.replace('schedule = "constant"\n', ""), changes)
        method = METHODS.get(config.method.name)
        preset = {} if method is None else method.presets.get(config.method.preset, {})
        if "schedule" in config.method.parameters() or "schedule" in preset:
            return config
        return load_run(SMALL, changes)

    return made


@pytest.fixture
def small_file(tmp_path: Path) -> Path:
    """The same as a file."""
    path = tmp_path / "small.toml"
    path.write_text(SMALL)
    return path


def without_times(summary: dict[str, Any]) -> dict[str, Any]:
    """What must be equal between two runs of the same seed."""
    sites = {n: {k: s[k] for k in ("family", "texts", "alone", "after")} for n, s in summary["sites"].items()}
    return {"central": summary["central"], "sites": sites, "centralized": summary["centralized"]}
