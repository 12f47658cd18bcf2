"""kill -9 of the ServerApp, of a site, of everything; then `fedstill resume`: one round repeated, the same metrics."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from fedstill.common.config import RunConfig
from tests.conftest import without_times
from tests.federation.conftest import Federation

from .conftest import Running, family, nobody_left
from .test_runs import weights_of

Start = Callable[..., Running]
CHANGES = ("rounds=3", "exchange.reconnect=3", "report.alone=false", "report.centralized=false")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[RunConfig], Federation]:
    known: dict[str, Federation] = {}

    def run(config: RunConfig) -> Federation:
        if config.to_json() not in known:
            made = Federation(config, tmp_path_factory.mktemp("whole"))
            made.summary = made.run()  # type: ignore[attr-defined]
            known[config.to_json()] = made
        return known[config.to_json()]

    return run


def victims(running: Running, who: str) -> list[int]:
    if who == "server":
        return [int(running.events("run_started")[-1]["pid"])]
    if who == "site":
        apps = [p for p in family(running.folder) if any("flwr-clientapp" in part for part in p.cmdline())]
        return [apps[0].pid]
    return [running.process.pid, *(process.pid for process in family(running.folder))]


@pytest.mark.parametrize("who", ["server", "site", "everything"])
def test_a_killed_run_goes_on_to_the_same_end(
    fedstill: Start, small: Callable[..., RunConfig], small_file: Path, uninterrupted: Callable, who: str
) -> None:
    options = [option for change in CHANGES for option in ("--set", change)]
    running = fedstill("run", str(small_file), *options)
    running.wait_for("round_started", round=2)
    running.wait_for("progress", round=2)
    for pid in victims(running, who):
        with contextlib.suppress(ProcessLookupError, psutil.Error):
            os.kill(pid, signal.SIGKILL)
    code = running.finish(120)
    assert code == (-signal.SIGKILL if who == "everything" else 1), running.output()
    assert nobody_left(running.folder, 30)
    resumed = fedstill("resume", "latest")
    assert resumed.finish() == 0, resumed.output()
    assert resumed.events("resumed")[-1]["round"] in (1, 2)
    whole = uninterrupted(small(*CHANGES))
    assert weights_of(resumed.run) == whole.weights()
    assert without_times(resumed.summary()) == without_times(whole.summary)
    rounds = [event["round"] for event in resumed.events("round_started")]
    assert len(rounds) <= 4  # three, and at most one of them twice
    again = fedstill("resume", "latest")
    assert again.finish(60) == 0
    assert "is finished already" in again.output()
