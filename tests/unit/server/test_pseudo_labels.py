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


def test_the_mean_is_compared_with_the_best_site_on_texts_whose_labels_are_known() -> None:
    # rows 0 to 3 are blind texts; of row 4 nobody knows the label, and row 5 south has not predicted
    seen = PseudoLabels(2, 6, known={0: 0, 1: 1, 2: 0, 3: 1, 5: 0})
    strong, weak = np.log([[0.6, 0.4], [0.4, 0.6]]), np.log([[0.9, 0.1], [0.1, 0.9]])
    seen.observe("north", np.arange(6), strong[[0, 1, 0, 1, 0, 0]])  # right, but not sure
    seen.observe("south", np.arange(5), weak[[0, 0, 1, 1, 1]])  # sure, and wrong on rows 1 and 2
    compared = seen.compared({"north": 10, "south": 10})
    # the mean follows south; they differ on two of four texts: sqrt(0.5 / 4)
    assert compared is not None
    assert (compared.texts, compared.site, compared.best, compared.together) == (4, "north", 1.0, 0.5)
    assert compared.error == pytest.approx(0.125**0.5)
    # by sizes of 90 and 10 it follows north: 0.9 * 0.6 + 0.1 * 0.1 > 0.5
    better = seen.compared({"north": 90, "south": 10})
    assert better is not None
    assert (better.together, better.error) == (1.0, 0.0)
    # the plain one may be the better: 0.9 + 0.4 > 1, and by sizes 0.1 * 0.9 + 0.9 * 0.4 < 0.5
    seen = PseudoLabels(2, 1, known={0: 0})
    seen.observe("north", np.array([0]), weak[[0]])
    seen.observe("south", np.array([0]), strong[[1]])
    plain = seen.compared({"north": 10, "south": 90})
    assert plain is not None
    assert plain.together == 1.0


def test_nothing_is_compared_without_labels_or_with_one_site() -> None:
    for known, sites in (({}, ("north", "south")), ({0: 1}, ("north",))):
        seen = PseudoLabels(2, 4, known=known)
        assert seen.compared({}) is None
        for site in sites:
            seen.observe(site, np.arange(4), SURE[[0, 1, 0, 1]])
        assert seen.compared({"north": 1, "south": 1}) is None
