"""Rows that share a first training end as if each had trained by itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fedstill.common.config import RunConfig
from fedstill.experiments.compare.model_outputs import load_outputs
from fedstill.experiments.compare.worker import run_in_process
from tests.conftest import without_times

Small = Callable[..., RunConfig]


@pytest.fixture
def run(tmp_path: Path, small: Small) -> Callable[..., tuple[dict, Path]]:  # type: ignore[type-arg]
    def once(name: str, shared: bool, *changes: str) -> tuple[dict, Path]:  # type: ignore[type-arg]
        folder = tmp_path / name
        config = small("report.alone=false", "report.centralized=false", *changes)
        run_in_process(config, folder, resume=False, reuse=tmp_path / "shared" if shared else None)
        return json.loads((folder / "summary.json").read_text()), folder

    return once


def test_a_shared_first_training_changes_no_bit(run: Callable[..., tuple[dict, Path]], tmp_path: Path) -> None:  # type: ignore[type-arg]
    run("first", True, "method.name=mhat")
    held = sorted(path.name for path in (tmp_path / "shared").iterdir())
    assert len(held) == 2  # one a site
    shared, one = run("second", True, "method.name=ds-fl")
    assert sorted(path.name for path in (tmp_path / "shared").iterdir()) == held
    plain, other = run("third", False, "method.name=ds-fl")
    assert without_times(shared) == without_times(plain)
    a, b = load_outputs(one), load_outputs(other)
    assert a is not None
    assert b is not None
    assert sorted(a) == sorted(b)
    assert all(np.array_equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(
    "change", ["seed=2", "train.learning_rate=2e-3", "method.local_epochs=2", "data.private=60", "train.max_length=12"]
)
def test_what_differs_is_not_shared(
    run: Callable[..., tuple[dict, Path]],  # type: ignore[type-arg]
    tmp_path: Path,
    change: str,
) -> None:
    quick = ("rounds=1", "method.name=isolated", "sites.south.model=tiny-bert")
    run("first", True, *quick)
    run("second", True, *quick, change)
    assert len(list((tmp_path / "shared").iterdir())) == 4
