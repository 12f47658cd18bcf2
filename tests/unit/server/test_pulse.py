"""What is told of an Ask while it goes on: every answer of a few sites, and not the square of many."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedstill.common.config.files import load_run
from fedstill.server.costs import Costs
from fedstill.server.pulse import FEW, Pulse
from fedstill.server.record import Record

RUN = 'method = {name = "fedmd"}\ncentral = {model = "tiny-bert"}\nsites = [{name = "s", count = 2}]'


@pytest.mark.parametrize("count", [FEW, FEW + 1])
def test_answers_to_a_long_ask_are_told_one_by_one_of_a_few_sites(tmp_path: Path, count: int) -> None:
    told = []
    pulse = Pulse(Record(tmp_path, load_run(RUN), told.append), Costs())
    names = [f"s-{number}" for number in range(count)]
    pulse.asked(1, "training", "train.local", names, quick=False)
    for _ in range(10):
        for name in names:
            pulse.heard(1, name)
    pulse.done(1)
    traffic = [event for event in told if event["event"] == "traffic"]
    assert list(traffic[-1]["sites"]) == names  # who comes later reads the last one
    if count <= FEW:
        assert len(traffic) == 10 * count + 1
    else:  # one each while they were few, then by the clock
        assert len(traffic) < 3 * FEW
