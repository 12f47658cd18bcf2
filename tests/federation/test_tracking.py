"""Tracking against the real packages' files: what TensorBoard, MLflow and W&B hold is what the run reached."""

from __future__ import annotations

import json
import struct
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import fedstill
from fedstill.common.config import ConfigError, RunConfig
from fedstill.server.tracking import Tracking, check_packages, open_tracking, scalars_of
from tests.conftest import SMALL

Small = Callable[..., RunConfig]
QUICK = {"report.centralized": False, "method.distill_epochs": 1}


def run(tmp_path: Path, tool: str, **changes: Any) -> fedstill.Result:
    return fedstill.run(SMALL, set={**QUICK, "track.to": [tool], **changes}, runs=tmp_path / "runs")


def by_round(result: fedstill.Result, node: str = "central") -> dict[int, float]:
    return {row["round"]: row["accuracy"] for row in result.history if row["node"] == node}


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="pip install 'fedstill[tensorboard]'")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    result = run(tmp_path, "tensorboard")
    read = EventAccumulator(str(result.folder / "track/tensorboard"))
    read.Reload()
    for name, node in (("central/accuracy", "central"), ("sites/north/accuracy", "north")):
        assert {each.step: each.value for each in read.Scalars(name)} == pytest.approx(by_round(result, node))
    sent = {each.step: each.value for each in read.Scalars("bytes_up/north")}
    assert 0 < sent[1] < sent[2] <= result.sites["north"]["bytes_up"]
    assert [each.step for each in read.Scalars("agreement")] == [1, 2]
    assert read.Scalars("alone/south/accuracy")[0].value == pytest.approx(result.sites["south"]["alone"]["accuracy"])


def test_mlflow_and_a_resumed_run_goes_on_in_its_run(tmp_path: Path) -> None:
    pytest.importorskip("mlflow", reason="pip install 'fedstill[mlflow]'")
    from mlflow import MlflowClient

    result = run(tmp_path, "mlflow", **{"track.project": "trial"})
    client = MlflowClient(f"sqlite:///{result.folder / 'track/mlflow.db'}")
    [where] = [each for each in client.search_experiments() if each.name == "trial"]
    [held] = client.search_runs([where.experiment_id])
    assert held.info.status == "FINISHED"
    assert held.info.run_name == result.folder.name
    assert held.data.params["method.name"] == "fedid"
    assert held.data.params["sites.south.model"] == "tiny-roberta"
    history = client.get_metric_history(held.info.run_id, "central/accuracy")
    assert {each.step: each.value for each in history} == pytest.approx(by_round(result))
    assert [each.path for each in client.list_artifacts(held.info.run_id)] == ["report.html"]
    again = open_tracking(result.config, result.folder)
    assert again is not None
    again.event({"event": "agreement", "round": 9, "mean": 0.5})
    again.close()  # as if it had failed
    [held] = client.search_runs([where.experiment_id])
    assert held.info.status == "FAILED"
    assert held.data.metrics["agreement"] == 0.5


def kept_in(file: Path) -> Iterator[bytes]:
    """The records of W&B's file, in the format of LevelDB's log: blocks of 32 KiB, after a head of seven bytes."""
    data, at, whole = file.read_bytes(), 7, b""
    assert data[:4] == b":W&B"
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768  # too little room for a head: the block is padded
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        if at + 7 + length > len(data):
            return  # not all of it is written yet
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield whole
            whole = b""


def parsed(file: Path, records: Any) -> list[Any]:
    """The records so far: a process of W&B's writes them, and may be a little behind."""
    found = []
    for data in kept_in(file):
        found.append(records.Record())
        found[-1].ParseFromString(data)
    return found


def test_wandb_offline(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="pip install 'fedstill[wandb]'")
    from wandb.proto import wandb_internal_pb2 as records

    result = run(tmp_path, "wandb", rounds=1)
    [file] = (result.folder / "track").rglob("*.wandb")
    assert "offline-run" in str(file)
    seen, scores, end = set(), {}, time.monotonic() + 60
    while not any(record.WhichOneof("record_type") == "exit" for record in parsed(file, records)):
        assert time.monotonic() < end, "W&B's own process has not written the end of the run"
        time.sleep(0.1)
    for record in parsed(file, records):
        seen.add(record.WhichOneof("record_type"))
        values = {(item.key or "/".join(item.nested_key)): json.loads(item.value_json) for item in record.history.item}
        if "central/accuracy" in values:
            scores[int(values["round_number"])] = values["central/accuracy"]
        if record.WhichOneof("record_type") == "run":
            assert (record.run.run_id, record.run.project) == (result.folder.name, "fedstill")
    assert scores == pytest.approx(by_round(result))
    assert {"run", "history", "summary", "exit"} <= seen


class Broken:
    def __init__(self) -> None:
        self.told = 0

    def scalars(self, step: int, values: Any) -> None:
        self.told += 1
        raise OSError("no space left")

    def close(self, status: str, report: Path | None) -> None:
        raise AssertionError("it was left out")


class Kept(Broken):
    def scalars(self, step: int, values: Any) -> None:
        self.told += 1

    def close(self, status: str, report: Path | None) -> None:
        self.status = status


def test_a_tool_that_fails_is_left_out_and_the_others_go_on(tmp_path: Path) -> None:
    broken, kept = Broken(), Kept()
    tracking = Tracking({"broken": broken, "kept": kept}, tmp_path)
    for number in (1, 2):
        tracking.event({"event": "agreement", "round": number, "mean": 0.5})
    tracking.event({"event": "run_stopped", "round": 2})
    tracking.close()
    assert (broken.told, kept.told, kept.status) == (1, 2, "stopped")


def test_a_tool_that_is_not_installed_is_an_error_with_its_cure(small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.delitem(sys.modules, "fedstill.server.tracking.wandb_sink", raising=False)
    with pytest.raises(ConfigError, match=r"pip install 'fedstill\[wandb\]'"):
        check_packages(small('track.to=["wandb"]'))
    with pytest.raises(ConfigError, match=r"track\.to"):
        small('track.to=["comet"]')


def test_only_numbers_are_scalars() -> None:
    event = {
        "event": "round_finished",
        "central": {"accuracy": 0.5, "note": "x"},
        "sites": {},
        "metrics": {"loss": None},
    }
    assert dict(scalars_of(event)) == {"central/accuracy": 0.5}
    assert dict(scalars_of({"event": "round_started", "round": 1})) == {}
