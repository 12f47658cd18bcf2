"""Pseudo-labels pass by pass, by hand-made predictions."""

from __future__ import annotations

import numpy as np
import pytest

from fedstill.server.pseudo_labels import PseudoLabels

SURE = np.log(np.array([[0.9, 0.1], [0.1, 0.9]]))  # class 0, class 1


def test_accuracy_largest_class_and_movement_by_hand() -> None:
    seen = PseudoLabels(2, 4, truth=np.array([0, 1, 1, 0]))
    for rows in ([0, 1], [2, 3]):  # in batches: one pass
        seen.observe("north", np.array(rows), SURE[[0, 1]])
    seen.observe("south", np.arange(4), np.log(np.array([[0.8, 0.2]] * 4)))
    [(facts, right)] = seen.after_round()
    sites = {"north": {"largest": 0.5}, "south": {"largest": 1.0}}
    # together: 0.9 + 0.8 for class 0 where north says so, else 0.1 + 0.8 against 0.9 + 0.2
    assert facts == {"pass": 1, "texts": 4, "sites": sites, "together": {"largest": 0.5}}
    assert right == {"pass": 1, "texts": 4, "sites": {"north": 0.5, "south": 0.5}, "together": 0.5}
    # north again, twice in one round: first as before but for text 3, then all of class 1
    seen.observe("north", np.arange(4), SURE[[0, 1, 0, 0]])
    seen.observe("north", np.arange(4), SURE[[1, 1, 1, 1]])
    (first, right), (second, last) = seen.after_round()
    assert first["sites"]["north"] == {"largest": 0.75, "changed": 0.25, "moved": pytest.approx(0.2)}  # 0.8 of one in 4
    assert second["sites"]["north"] == {"largest": 1.0, "changed": 0.75, "moved": pytest.approx(0.6)}
    assert right is not None
    assert last is not None
    assert (right["sites"]["north"], last["sites"]["north"], last["pass"]) == (0.75, 0.5, 2)
    assert seen.after_round() == []


def test_without_labels_nothing_is_said_of_being_right_and_a_part_is_enough() -> None:
    seen = PseudoLabels(2, 4)
    seen.observe("north", np.array([1, 3]), SURE[[1, 1]])
    seen.observe("north", np.array([0]), np.zeros((1, 3)))  # of other classes: not a prediction of these texts
    [(facts, right)] = seen.after_round()
    assert (facts["texts"], facts["together"], right) == (2, {"largest": 1.0}, None)
