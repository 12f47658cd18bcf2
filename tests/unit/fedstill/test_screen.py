"""What a run shows at its end."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from fedstill.cli import tables
from fedstill.common.readable import main_score
from fedstill.pace import Pace
from fedstill.screen import Screen, results


@pytest.mark.parametrize(
    ("scores", "shown"),
    [
        (["accuracy"], "accuracy"),
        (["accuracy", "semantic_distance"], "accuracy"),
        (["accuracy", "f1", "semantic_distance"], "f1"),
        (["accuracy", "f1_weighted", "f1_weighted_baby"], "f1_weighted"),
        (["accuracy", "accuracy_imdb", "accuracy_sst2", "semantic_distance", "semantic_distance_imdb"], "accuracy"),
        (["accuracy", "accuracy_cb", "accuracy_copa", "mean_over_tasks"], "mean_over_tasks"),
    ],
)
def test_a_run_is_judged_by_its_tasks_own_metric(scores: list[str], shown: str) -> None:
    assert main_score(dict.fromkeys(scores, 0.5)) == shown


def test_no_number_is_cut_on_a_narrow_screen() -> None:
    scores = {"accuracy": 0.677, "semantic_distance": 0.323}
    site = {"model": "tiny-roberta-warm", "texts": 12_800, "alone": scores, "after": {"accuracy": 0.662},
            "bytes_up": 47_912, "bytes_down": 80_644}  # fmt: skip
    summary = {
        "status": "finished", "method": "fedid", "preset": "paper", "rounds": 2, "seed": 1, "test_texts": 400,
        "central": {"accuracy": 0.703}, "central_model": {"model": "tiny-bert-warm"}, "sites": {"north": site},
        "centralized": {"accuracy": 0.74}, "seconds": {"total": 170, "set-up": 17}, "phases": {},
    }  # fmt: skip
    page = io.StringIO()
    results(Console(file=page, width=80), summary, "runs/demo")
    for number in ("0.677", "0.662", "12,800", "47.9 kB", "80.6 kB", "0.703", "0.740", "accuracy on 400"):
        assert number in page.getvalue(), page.getvalue()


def test_names_are_never_cut_and_tables_fit_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    page = io.StringIO()
    monkeypatch.setattr(tables, "console", Console(file=page, width=80))
    name = "a-run-with-a-rather-long-name-20261118-043021"
    row = {"run": name, "status": "unfinished", "method": "fedavg-st", "rounds": 10, "score": "f1_weighted",
           "central": 0.78512, "seconds": 86_400.5}  # fmt: skip
    tables.print_table(list(row), [row, {**row, "run": "b"}])
    lines = page.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    starts = [lines[0].index(column) for column in ("run", "status", "method", "rounds")]
    first = lines[2 : next(number for number, line in enumerate(lines) if line.startswith("b "))]
    for start, end, text in zip(starts, starts[1:], (name, "unfinished", "fedavg-st"), strict=False):
        assert "".join(line[start:end].strip() for line in first) == text
    for word in ("0.785", "24.0 h"):
        assert word in page.getvalue()
    assert "…" not in page.getvalue()


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_time_left_is_the_forecast_and_then_the_pace_so_far() -> None:
    clock = Clock()
    forecast = {"seconds": 100.0, "rounds": 4, "parts": {"starting": 20.0, "local training": 40.0}}
    pace = Pace(forecast, clock)
    pace.enter("joining")
    clock.now = 5.0
    assert pace.left() == 15.0
    assert pace.in_all() == 95.0
    pace.begin_round(1, 4)
    pace.enter("local training")
    assert pace.left() == 10.0
    clock.now = 35.0
    assert pace.left() == 0.0  # longer than thought: nobody knows
    pace.enter("interactive")
    clock.now = 40.0
    assert pace.left(5, 20) == 15.0
    clock.now = 45.0
    pace.end_round(1, 4)
    assert pace.in_all() == 3 * 40.0
    pace.begin_round(2, 4)
    pace.enter("local training")
    clock.now = 50.0
    assert pace.left() == 30.0 - 5.0  # as long as the last time
    assert pace.in_all() == 3 * 40.0 - 5.0
    assert Pace(None, clock).in_all() is None


def test_a_terminal_shows_how_many_have_joined_and_the_time_left() -> None:
    page = io.StringIO()
    forecast = {"seconds": 100.0, "rounds": 4, "parts": {"starting": 20.0}}
    with Screen(Console(file=page, width=100, force_terminal=True, legacy_windows=False), forecast) as screen:
        screen.show({"event": "starting", "what": "starting Flower's SuperLink and SuperNodes"})
        assert "left · run" in screen.left()
        screen.show({"event": "joining", "sites": 4, "address": "127.0.0.1:1"})
        screen.show({"event": "site_joined", "site": "north", "joined": 3, "wanted": 4})
        assert screen.left().startswith("3/4 · ")
        screen.bar.refresh()  # type: ignore[union-attr]
        assert "waiting for sites" in page.getvalue()
        screen.show({"event": "asked", "round": 1, "phase": "local training", "verb": "train.local", "sites": []})
        assert "so far" in screen.left()
        assert screen.bar is not None
        assert screen.bar.tasks[0].description == "round 1 · local training"


def test_a_quiet_screen_says_nothing() -> None:
    page = io.StringIO()
    with Screen(Console(file=page, width=100, force_terminal=True), quiet=True) as screen:
        screen.show({"event": "joining", "sites": 4, "address": "127.0.0.1:1"})
        screen.show({"event": "asked", "round": 1, "phase": "local training", "verb": "train.local", "sites": []})
    assert page.getvalue() == ""
