"""Coordinates of labels, and the distance of the expected label from the true one."""

from __future__ import annotations

import numpy as np
import pytest

from fedstill.common.config import TaskConfig
from fedstill.common.config.files import load_run
from fedstill.common.data.tasks import (
    INFERENCE_TRIANGLE,
    TASKS,
    VALENCE_AROUSAL,
    Task,
    TaskError,
    domain_scores,
    load_task,
    on_a_line,
    semantic_distance,
)

STARS = on_a_line(5)


def test_the_papers_example() -> None:
    """A wrong guess next door (expected label 1.996) is nearer than a right one without conviction (2.8)."""
    near, far = [[0.2, 0.7, 0.033, 0.033, 0.033]], [[0.4, 0.1, 0.1, 0.1, 0.3]]
    assert semantic_distance(near, [0], STARS) == pytest.approx(0.2 + 1.4 + 0.033 * 12 - 1)
    assert semantic_distance(near, [0], STARS) == pytest.approx(1.97 - 1, abs=0.03)
    assert semantic_distance(far, [0], STARS) == pytest.approx(2.8 - 1)


def test_every_label_counts_the_same_however_many_texts_have_it() -> None:
    sure = np.eye(5)
    # label 0: off by 0, 0, 0; label 4: off by 2; label 2 does not occur
    assert semantic_distance(sure[[0, 0, 0, 2]], [0, 0, 0, 4], STARS) == pytest.approx((0 + 2) / 2)


def test_each_domain_has_its_own_scores_where_there_are_several() -> None:
    graded = Task("graded", ("low", "mid", "high"), metric="accuracy", coordinates=on_a_line(3))
    sure = 60.0 * np.eye(3)[[0, 1, 2, 0]]  # a: both right; b: right, and off by two
    found = domain_scores(graded, [0, 1, 2, 2], sure, ["a", "a", "b", "b"])
    assert found == pytest.approx(
        {"accuracy_a": 1.0, "semantic_distance_a": 0.0, "accuracy_b": 0.5, "semantic_distance_b": 1.0}
    )
    assert domain_scores(graded, [0, 1], sure[:2], ["a", "a"]) == {}
    assert domain_scores(graded, [0, 1], sure[:2], None) == {}


def test_distances_in_the_plane_and_in_space() -> None:
    emotions, inference = tuple(VALENCE_AROUSAL.values()), tuple(INFERENCE_TRIANGLE.values())
    # half anger, half surprise expects (0, .85); none is (0, 0)
    assert semantic_distance([[0.5, 0, 0, 0, 0.5]], [2], emotions) == pytest.approx(0.85)
    assert semantic_distance([[0.5, 0, 0.5]], [1], inference) == pytest.approx(1.0)


@pytest.mark.parametrize(("outputs", "labels"), [([[1.0, 0.0]], [0]), ([[0.2] * 5], [0, 1]), (np.empty((0, 5)), [])])
def test_what_does_not_fit_is_refused(outputs: list[list[float]], labels: list[int]) -> None:
    with pytest.raises(TaskError, match=r"task\.coordinates needs a point for each label"):
        semantic_distance(outputs, labels, STARS)


def test_a_task_has_the_coordinates_of_its_configuration() -> None:
    assert TASKS["film-reviews"].coordinates == ((1.0,), (2.0,))
    config = load_run('[task]\ncoordinates = [[0, 0], [3, 4]]\nname = "film-reviews"\n')
    assert load_task(config.task)[0].coordinates == ((0.0, 0.0), (3.0, 4.0))
    assert load_task(TaskConfig())[0].coordinates == ((1.0,), (2.0,))


@pytest.mark.parametrize("points", [((1.0,),), ((1.0,), (1.0,)), ((1.0,), (1.0, 2.0)), ((1.0,), (float("nan"),))])
def test_coordinates_that_make_no_sense(points: tuple[tuple[float, ...], ...]) -> None:
    with pytest.raises(TaskError, match="one different point for each of"):
        Task(name="t", labels=("a", "b"), coordinates=points)
