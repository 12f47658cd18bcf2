"""When a federation does not learn, somebody says so: each sign by hand-made numbers, and none on a healthy run."""

from __future__ import annotations

import numpy as np
import pytest

from fedstill.common.wire import Reply
from fedstill.server.diagnosis import Diagnosis

BALANCED = [0, 1] * 20


def votes(site: str, classes: list[int]) -> Reply:
    return Reply(site, {"logits": np.eye(2, dtype=np.float32)[classes]})


def said(diagnosis: Diagnosis, *replies: Reply, loss: float = 0.5, central: float = 0.8, **sites: float) -> list[str]:
    diagnosis.observe(replies)
    scores = {site: {"accuracy": value} for site, value in sites.items()}
    return [finding.what for finding in diagnosis.after_round({"loss": loss}, {"accuracy": central}, scores)]


def test_a_healthy_run_hears_nothing() -> None:
    diagnosis = Diagnosis(2)
    for number in range(5):
        mostly = [*BALANCED[:-4], 0, 0, 0, 0]
        replies = (votes("north", BALANCED), votes("south", mostly))
        assert said(diagnosis, *replies, loss=1 / (number + 1), north=0.75, south=0.8) == []


def test_one_class_is_said_when_it_lasts_and_not_again() -> None:
    diagnosis = Diagnosis(2)
    replies = (votes("north", BALANCED), votes("south", [1] * 40))
    first = said(diagnosis, *replies, loss=3.0)
    assert not any("one class" in what for what in first)
    [what] = [what for what in said(diagnosis, *replies, loss=2.0) if "one class" in what]
    assert "100%" in what
    assert not any("one class" in what for what in said(diagnosis, *replies, loss=1.0))


def test_sites_that_agree_by_chance_are_noticed() -> None:
    diagnosis = Diagnosis(2)
    [what] = said(diagnosis, votes("north", BALANCED), votes("south", [0, 0, 1, 1] * 10))
    assert what == "the sites agree on 50% of the public texts, and 50% would be chance"


def test_sites_with_other_mixes_of_labels_agree_less_by_chance() -> None:
    # north puts class 0 first for 80 % of the texts, south for 20 %, so that by chance they agree on 32 %, not on 50 %
    north, south, west = [0] * 32 + [1] * 8, [0] * 8 + [1] * 32, [0] * 28 + [1] * 12
    diagnosis = Diagnosis(2)
    assert said(diagnosis, votes("north", north), votes("south", south), votes("west", west)) == []
    # pairs agree on 40, 90 and 50 %, by chance on 32, 62 and 38 %
    assert diagnosis.agreement["mean"] == 0.6
    assert diagnosis.agreement["chance"] == 0.44
    assert abs(diagnosis.kappa - (0.08 / 0.68 + 0.28 / 0.38 + 0.12 / 0.62) / 3) < 1e-12


def test_a_few_predictions_prove_nothing() -> None:
    assert said(Diagnosis(2), votes("north", [0, 1] * 5), votes("south", [1, 0] * 5)) == []


def test_a_loss_that_stands_still_is_said_once_after_three_rounds() -> None:
    diagnosis = Diagnosis(2)
    assert [said(diagnosis, loss=0.693) for _ in range(2)] == [[], []]
    assert said(diagnosis, loss=0.692) == ["the loss has not fallen in three rounds (0.6930, now 0.6920)"]
    assert said(diagnosis, loss=0.692) == []


@pytest.mark.parametrize("constant", [True, False])
def test_a_central_model_behind_is_told_to_let_its_rate_fall_if_it_does_not(constant: bool) -> None:
    [finding] = Diagnosis(2, constant).after_round(
        {}, {"accuracy": 0.6}, {"north": {"accuracy": 0.8}, "south": {"accuracy": 0.8}}
    )
    assert finding.who == "central"
    assert ("method.schedule = 'run'" in finding.change) is constant


def test_who_is_far_behind_is_named_and_so_is_a_central_model_below_its_best_site() -> None:
    what = said(Diagnosis(2), north=0.8, south=0.82, east=0.5, central=0.7)
    assert what == [
        "its accuracy is 0.500, and the sites' median 0.800",
        "its accuracy is 0.700, and the best site's 0.820",
    ]
