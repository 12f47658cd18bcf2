"""When a federation does not learn, somebody says so: each sign by hand-made numbers, and none on a healthy run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from fedstill.common.config import RunConfig
from fedstill.common.wire import Reply
from fedstill.server.diagnosis import Diagnosis, diagnosis_of
from fedstill.server.pseudo_labels import Compared
from fedstill.strategies import make_method

BALANCED = [0, 1] * 20


def votes(site: str, classes: list[int]) -> Reply:
    return Reply(site, {"logits": np.eye(2, dtype=np.float32)[classes]})


def said(
    diagnosis: Diagnosis,
    *replies: Reply,
    loss: float = 0.5,
    central: float = 0.8,
    last: bool = False,
    losses: dict[str, list[float]] | None = None,
    number: int = 0,
    compared: Compared | None = None,
    **sites: float,
) -> list[str]:
    diagnosis.observe(replies)
    scores = {site: {"accuracy": value} for site, value in sites.items()}
    found = diagnosis.after_round({"loss": loss}, {"accuracy": central}, scores, number, last, losses, compared)
    return [finding.what for finding in found]


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
    replies = (votes("north", BALANCED), votes("south", [0, 0, 1, 1] * 10))
    assert said(diagnosis, *replies) == []  # heads on frozen layers may need a round
    [what] = said(diagnosis, *replies)
    assert said(diagnosis, *replies, loss=0.4) == []  # once is enough
    assert said(Diagnosis(2), *replies, last=True) == [what]
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
    sites = {"north": {"accuracy": 0.8}, "south": {"accuracy": 0.8}}
    [finding] = Diagnosis(2, constant).after_round({}, {"accuracy": 0.6}, sites, last=True)
    assert finding.who == "central"
    assert ("method.schedule = 'run'" in finding.change) is constant


def test_who_is_far_behind_is_named_and_so_is_a_central_model_below_its_best_site() -> None:
    scores = {"north": 0.8, "south": 0.82, "east": 0.5, "central": 0.7}
    diagnosis = Diagnosis(2)
    assert said(diagnosis, **scores) == []
    assert said(diagnosis, **scores) == [
        "its accuracy is 0.500, and the sites' median 0.800",
        "its accuracy is 0.700, and the best site's 0.820",
    ]


@pytest.mark.parametrize(("east", "tests", "told"), [(0.59, 36, True), (0.61, 36, False), (0.64, 0, True)])
def test_few_test_texts_prove_no_site_to_be_behind(east: float, tests: int, told: bool) -> None:
    # three standard errors at 0.8 are 3 * sqrt(0.8 * 0.2 / 36) = 0.2, more than the usual 0.15
    what = said(Diagnosis(2, tests=tests), north=0.8, south=0.8, east=east, last=True)
    assert what == ([f"its accuracy is {east:.3f}, and the sites' median 0.800"] if told else [])


@pytest.mark.parametrize(("own", "told"), [(None, True), (0.36, True), (0.33, False)])
def test_one_class_in_a_single_round_is_said_unless_the_site_knows_its_own_texts(own: float | None, told: bool) -> None:
    # a site that guesses has ln 2 = 0.693; below half of it, 0.347, it knows its texts, and these may be of one label
    losses = None if own is None else {"south": [0.8, own]}
    what = said(Diagnosis(2), votes("south", [1] * 40), losses=losses, last=True)
    assert what == (["it has put one class first for 100% of the public texts"] if told else [])


@pytest.mark.parametrize(("ones", "told"), [(990, True), (970, False)])
def test_one_class_is_no_sign_where_the_labels_themselves_are_so_skewed(ones: int, told: bool) -> None:
    # 95 % of the labels are 1: with 1,000 texts chance ends at 0.95 + 3 * sqrt(0.95 * 0.05 / 1000) = 0.9707
    diagnosis = Diagnosis(2, usual=0.95)
    assert bool(said(diagnosis, votes("north", [1] * ones + [0] * (1000 - ones)), last=True)) is told
    assert said(diagnosis, votes("north", [1] * 40), last=True) == []  # with 40 texts it ends above 1


def test_a_central_model_with_one_class_is_said_in_the_last_round_or_after_two() -> None:
    diagnosis, one = Diagnosis(2), np.array([1] * 39 + [0])
    what = "it has put one class first for 98% of the test texts"
    diagnosis.tested = one
    assert said(diagnosis, loss=0.6) == []
    diagnosis.tested = one
    assert said(diagnosis) == [f"{what}, two rounds in a row"]
    assert said(diagnosis, loss=0.4, last=True) == []  # not tested in this round
    for tested, told in ((one, [what]), (np.array([1] * 38 + [0] * 2), []), (one[:29], [])):
        assert said(replace(Diagnosis(2), tested=tested), last=True) == told


@pytest.mark.parametrize(
    ("losses", "told"),
    [
        ([0.690, 0.688], True),  # 0.3 % less, where 0.5 % is asked for
        ([0.690, 0.680], False),
        ([0.340, 0.341], False),  # below half of ln 2: it knows its texts already
        ([9.000, 0.770], True),  # fell, and is still 1.1 times ln 2 = 0.7625 and more
        ([9.000, 0.755], False),
        ([0.900], False),  # one epoch's mean has its beginning in it
    ],
)
def test_local_training_that_leads_nowhere_is_said_after_one_round(losses: list[float], told: bool) -> None:
    what = said(Diagnosis(2), losses={"north": losses}, number=1, last=True)
    expected = (
        f"its loss on its own texts went from {losses[0]:.4f} to {losses[-1]:.4f} in the round's 2 epochs, "
        "and guessing has 0.6931"
    )
    assert what == ([expected] if told else [])


def test_a_loss_that_stands_still_counts_once_rates_have_stopped_rising() -> None:
    diagnosis = Diagnosis(2, warm=2)
    still = {"north": [0.69, 0.69]}
    assert [bool(said(diagnosis, losses=still, number=number, loss=1 / number)) for number in (1, 2, 3)] == [
        False,
        True,
        False,
    ]


def test_worse_than_guessing_is_said_in_the_second_round_of_many() -> None:
    diagnosis = Diagnosis(3)  # ln 3 = 1.0986, and 1.1 times that is 1.208
    assert [bool(said(diagnosis, losses={"north": [9.0, 1.21]}, number=n, loss=1 / n)) for n in (1, 2, 3)] == [
        False,
        True,
        False,
    ]


@pytest.mark.parametrize(
    ("together", "error", "texts", "told"),
    [
        (0.65, 0.04, 100, True),  # 0.15 behind, and three standard errors are 0.12
        (0.65, 0.06, 100, False),  # three are 0.18
        (0.71, 0.01, 100, False),  # 0.09 behind is little, however sure
        (0.65, 0.04, 29, False),
    ],
)
def test_an_ensemble_worse_than_its_best_site_is_said(together: float, error: float, texts: int, told: bool) -> None:
    compared = Compared(texts, "north", 0.8, together, error)
    what = said(Diagnosis(2), compared=compared, last=True)
    sentence = "together they are right on 65% of 100 public texts with known labels, and north alone on 80%"
    assert what == ([sentence] if told else [])
    assert said(Diagnosis(2), compared=compared) == []  # a first round among several


@pytest.mark.parametrize(
    ("changes", "warm"),
    [
        (("rounds=1", "method.schedule=run"), 1),
        (("rounds=50", "method.schedule=run"), 6),  # twice 6 % of 50
        (("rounds=10", "method.schedule=run", "train.warmup=0.3"), 6),
        (("rounds=50", "method.schedule=call"), 1),
    ],
)
def test_the_round_after_warm_up_and_the_labels_mix_come_from_the_run(
    small: Callable[..., RunConfig], changes: tuple[str, ...], warm: int
) -> None:
    config = small("method.name=ds-fl", *changes)
    central = SimpleNamespace(classes=2, test_texts=range(24), largest_class=0.6)
    made = diagnosis_of(config, make_method(config.method), central)  # type: ignore[arg-type]
    assert (made.classes, made.tests, made.usual, made.warm) == (2, 24, 0.6, warm)
