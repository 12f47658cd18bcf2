"""Warnings of whole runs: heads on frozen layers that learn hear nothing, and a hopeless rate is told in one round."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fedstill.common.config.files import load_run
from fedstill.common.practice import Practice

from .conftest import Federation

Make = Callable[..., Federation]
HEADS = """
rounds = 1
[data]
private = 900
public = 120
labelled = 40
test = 200
partition = "iid"
[train]
batch_size = 16
max_length = 48
keep = "end"
learning_rate = 1e-2
[method]
name = "ds-fl"
[central]
model = "small-bert"
freeze = "encoder"
[[sites]]
name = "north"
model = "small-bert"
freeze = "encoder"
[[sites]]
name = "south"
model = "small-bert"
freeze = "encoder"
head = "mlp"
[report]
alone = false
centralized = false
"""


def told(made: Federation) -> set[tuple[str, str]]:
    """Who was warned, and the first words."""
    made.run()
    return {(event["who"], " ".join(event["what"].split()[:4])) for event in made.events("warning")}


@pytest.mark.parametrize(
    "changes",
    [
        ("method.name=fedkd", "method.distill_epochs=10"),
        ("method.name=ds-fl", "rounds=3"),
        ("method.name=fedid", "rounds=2"),
        ("method.name=adafd", "rounds=2", "data.blind=true"),
        ("method.name=fedavg", "rounds=2", "sites.south.head=linear"),
        ("method.name=isolated",),  # its central model does not learn, and is not meant to
    ],
    ids=lambda changes: changes[0],
)
def test_a_healthy_run_has_no_warning(federation: Make, changes: tuple[str, ...]) -> None:
    made = federation(load_run(HEADS, changes))
    assert told(made) == set()
    last = made.events("round_finished")[-1]
    assert all(scores["accuracy"] > 0.6 for scores in last["sites"].values())  # it does learn


@pytest.mark.parametrize(("rate", "method"), [("1.0", "fedkd"), ("1.0", "fedid"), ("1e-7", "fedkd")])
def test_a_hopeless_rate_is_told_in_one_round(federation: Make, rate: str, method: str) -> None:
    changes = (f"train.learning_rate={rate}", f"method.name={method}", "sites.south.head=linear")
    made = federation(load_run(HEADS, changes))
    assert {("north", "its loss on its"), ("south", "its loss on its")} <= told(made)
    assert any("sites.north.learning_rate" in event["change"] for event in made.events("warning"))


def test_scores_from_before_the_first_round_are_not_held_against_later_ones(federation: Make) -> None:
    made = federation(load_run(HEADS, ("rounds=3", "report.evaluate=end")))
    made.nodes[0].train_privately(3, Practice())  # ahead of the central model before the run, not after it
    assert told(made) == set()
    before = made.events("tested")[0]
    assert before["central"]["accuracy"] < before["sites"]["north"]["accuracy"] - 0.11


def test_a_central_model_that_puts_one_class_first_is_told_in_one_round(federation: Make) -> None:
    made = federation(load_run(HEADS, ("method.name=fedkd", "central.learning_rate=1e-9")))
    made.central.learner.model.head[1].bias.data[1] = 50.0  # type: ignore[index,union-attr]
    assert ("central", "it has put one") in told(made)


def test_an_ensemble_worse_than_its_best_site_is_told_where_blind_texts_are_known(federation: Make) -> None:
    made = federation(load_run(HEADS, ("data.blind=true", "data.labelled=100")))
    made.federation.pseudo.truth = None  # as in a run on real texts: only the blind ones' labels are known
    south = made.nodes[1]
    south.labels.copy_(1 - south.labels)  # labelled the wrong way round
    assert ("all sites", "together they are right") in told(made)
