"""A site's state on disk while another has its place: optimizers are read and written only where somebody used them."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedstill.client.aside import OnDisk, fetched, set_aside
from fedstill.common.checkpoint import CheckpointError

LOCAL, DISTIL = ({"0": {"step": np.array(value, np.float32), "mean": np.full(3, value)}} for value in (1.0, 2.0))


def state(**optimizers: Any) -> dict[str, Any]:
    return {"model": {"w": np.arange(4.0)}, "kept": {"list": {"a": np.arange(2)}}, "optimizer": optimizers}


def test_a_state_comes_back_and_only_its_owner_may_read_it(tmp_path: Path) -> None:
    found = fetched(*set_aside(tmp_path / "site" / "away", 1, state(local=LOCAL, fresh={})))
    assert found["model"]["w"].tolist() == [0, 1, 2, 3]
    assert found["kept"]["list"]["a"].tolist() == [0, 1]
    assert list(found["optimizer"]) == ["local"]  # one without a state is made anew
    assert found["optimizer"]["local"]["0"]["mean"].tolist() == [1, 1, 1]
    assert found["optimizer"]["local"]["0"]["step"].shape == ()
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "site" / "away").iterdir()} == {0o600}


def test_only_an_optimizer_that_was_read_is_written_again(tmp_path: Path) -> None:
    found = fetched(*set_aside(tmp_path, 1, state(local=LOCAL, distil=DISTIL)))
    before = {path.name: path.stat().st_ino for path in tmp_path.iterdir()}
    found["optimizer"]["local"] = {"0": {"mean": np.full(3, 5.0)}}
    again = fetched(*set_aside(tmp_path, 2, found))
    after = {path.name: path.stat().st_ino for path in tmp_path.iterdir()}
    assert sorted(after) == ["1-1", "2-0", "2-rest"]
    assert after["1-1"] == before["1-1"]
    assert again["optimizer"]["local"]["0"]["mean"].tolist() == [5, 5, 5]
    assert dict(again["optimizer"]["distil"].items())["0"]["mean"].tolist() == [2, 2, 2]


def test_an_older_table_never_reads_newer_arrays(tmp_path: Path) -> None:
    older = set_aside(tmp_path, 1, state(local=LOCAL))[1]["local"]
    set_aside(tmp_path, 2, state(local=DISTIL))
    with pytest.raises(FileNotFoundError):
        older.items()


def test_what_an_earlier_process_left_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "1-rest").write_text("old")
    (tmp_path / "7-0").write_text("old")
    main, _ = set_aside(tmp_path, 1, state())
    assert main["model"]["w"].tolist() == [0, 1, 2, 3]
    assert [path.name for path in tmp_path.iterdir()] == ["1-rest"]


def test_a_state_that_cannot_be_written_leaves_the_one_before(tmp_path: Path) -> None:
    found = fetched(*set_aside(tmp_path, 1, state(local=LOCAL, distil=DISTIL)))
    found["model"], found["optimizer"]["distil"] = {"w": np.zeros(100_000)}, {"0": {"mean": np.full(3, 7.0)}}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.raises(CheckpointError, match=r"2-rest: cannot be written \(File too large\)"):
            set_aside(tmp_path, 2, found)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1-0", "1-1", "1-rest"]  # no half of the second
    assert isinstance(found["optimizer"]["local"], OnDisk)
    assert found["optimizer"]["local"]["0"]["mean"].tolist() == [1, 1, 1]
