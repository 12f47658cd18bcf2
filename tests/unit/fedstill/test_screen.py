"""What a run shows at its end."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from fedstill.screen import main_score, results


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
