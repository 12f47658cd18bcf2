"""How long a site's work took shows in no answer: it leaves at the next multiple of the cadence, errors too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fedstill.client.node import Node
from fedstill.client.release import cadence
from fedstill.common.config import RunConfig
from fedstill.common.wire import Ask

HIDDEN = "sites.north.privacy={epsilon = 50.0, noise_multiplier = 4.0, cadence = 5.0}"


class Clock:
    """A clock that goes when it is looked at, when work is done and when somebody sleeps."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        patch.setattr(cadence, "monotonic", self.look)
        patch.setattr(cadence, "sleep", self.work)

    def look(self) -> float:
        self.now += 0.001
        return self.now

    def work(self, seconds: float) -> None:
        assert seconds >= 0
        self.now += seconds


@pytest.mark.parametrize(("work", "leaves"), [(0.001, 5), (4.9, 5), (5.1, 10), (12.0, 15)])
@pytest.mark.parametrize("fails", [False, True])
def test_an_answer_leaves_at_a_multiple_of_the_cadence(
    work: float, leaves: int, fails: bool, small: Callable[..., RunConfig], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    config, clock = small(HIDDEN), Clock(monkeypatch)
    node = Node(config, config.sites[0], "run", tmp_path)
    predict = node.learner.predict

    def slow(*args: object) -> np.ndarray:
        clock.work(work)
        if fails:
            raise KeyError("row 17")
        return predict(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(node.learner, "predict", slow)
    began = clock.now
    if fails:
        with pytest.raises(RuntimeError, match=r"query\.predictions failed"):
            node.answer(Ask("query.predictions", {"rows": np.arange(4)}))
    else:
        node.answer(Ask("query.predictions", {"rows": np.arange(4)}))
    assert clock.now - began == pytest.approx(leaves, abs=0.01)
    assert (tmp_path / "ledger.jsonl").stat().st_size > 0


def test_a_refusal_takes_as_long_as_an_answer(
    small: Callable[..., RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, clock = small(HIDDEN), Clock(monkeypatch)
    node = Node(config, config.sites[0], "run", tmp_path)
    began = clock.now
    with pytest.raises(ValueError, match="not declared safe"):
        node.answer(Ask("query.counts"))
    assert clock.now - began == pytest.approx(5, abs=0.01)
