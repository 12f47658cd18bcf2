"""AdaFD's weights on numbers worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedstill.common.maths.ensemble import mean_predictions
from fedstill.common.maths.weights import (
    best_beta,
    class_losses,
    enwc,
    mean_entropy,
    normalised,
    per_class,
    rnwc,
)


def test_rnwc_is_the_share_of_the_reciprocal() -> None:
    """1 / 0.5 = 2, 1 / 0.25 = 4, 1 / 1 = 1: sevenths."""
    assert rnwc({"a": 0.5, "b": 0.25, "c": 1.0}) == pytest.approx({"a": 2 / 7, "b": 4 / 7, "c": 1 / 7})
    assert rnwc({"a": 0.0, "b": 1.0}, epsilon=0.25) == pytest.approx({"a": 4 / 4.8, "b": 0.8 / 4.8})


def test_enwc_is_the_share_of_the_exponential() -> None:
    """With beta = 5 a loss that is log(2) / 5 lower counts twice."""
    step = float(np.log(2) / 5)
    assert enwc({"a": 0.3, "b": 0.3 + step, "c": 0.3 + 2 * step}) == pytest.approx({"a": 4 / 7, "b": 2 / 7, "c": 1 / 7})
    assert enwc({"a": 0.1, "b": 3.0}, beta=0.0) == {"a": 0.5, "b": 0.5}


def test_losses_of_nothing_and_of_very_much_still_have_weights() -> None:
    assert rnwc({"a": 0.0, "b": 1.0}) == pytest.approx({"a": 1.0, "b": 0.0}, abs=1e-9)
    assert enwc({"a": 4000.0, "b": 4000.0, "c": 9000.0}) == pytest.approx({"a": 0.5, "b": 0.5, "c": 0.0})


@given(st.lists(st.floats(0.01, 20), min_size=2, max_size=8), st.floats(0, 20))
def test_weights_sum_to_one_and_without_a_site_the_others_keep_their_ratio(losses: list[float], beta: float) -> None:
    names = [f"site-{i}" for i in range(len(losses))]
    everybody = dict(zip(names, losses, strict=True))
    fewer = {name: loss for name, loss in everybody.items() if name != "site-0"}
    for rule in (rnwc, lambda given: enwc(given, beta)):
        before, after = rule(everybody), rule(fewer)  # type: ignore[operator]
        assert sum(before.values()) == pytest.approx(1.0)
        assert sum(after.values()) == pytest.approx(1.0)
        rest = sum(before[name] for name in fewer)
        if rest > 1e-6:
            assert after == pytest.approx({name: before[name] / rest for name in fewer}, abs=1e-9)


def test_what_are_no_weights_is_refused() -> None:
    for shares in ({"a": 0.0}, {"a": -1.0, "b": 3.0}, {"a": float("nan")}, {"a": float("inf")}):
        with pytest.raises(ValueError, match="no weights"):
            normalised(shares)


def test_each_class_has_weights_of_its_own() -> None:
    """Class 0 both have, class 1 only b, class 2 nobody: then the losses over all texts count."""
    losses = {"a": [0.5, None, None], "b": [0.25, 2.0, None]}
    found = per_class(losses, {"a": 1.0, "b": 0.5}, rnwc)
    assert found["a"] == pytest.approx([1 / 3, 0.0, 1 / 3])
    assert found["b"] == pytest.approx([2 / 3, 1.0, 2 / 3])


def test_logits_are_averaged_by_site_or_by_site_and_class() -> None:
    logits = {"a": np.array([[1.0, 2.0]], np.float32), "b": np.array([[3.0, 6.0]], np.float32)}
    assert mean_predictions(logits, {"a": 0.25, "b": 0.75}).tolist() == [[2.5, 5.0]]
    by_class = {"a": np.array([1.0, 0.5]), "b": np.array([0.0, 0.5])}
    assert mean_predictions(logits, by_class).tolist() == [[1.0, 4.0]]


def test_the_beta_that_predicts_the_labels_best_wins() -> None:
    """CE is -log 0.8 and -log 0.7 for the right order, and of two equals the smaller beta is taken."""
    p, labels = np.array([[0.8, 0.2], [0.3, 0.7]]), np.array([0, 1])
    right, wrong = np.log(p).astype(np.float32), np.log(p[:, ::-1]).astype(np.float32)
    assert best_beta({1.0: wrong, 10.0: right, 5.0: np.zeros((2, 2), np.float32)}, labels) == 10.0
    assert best_beta({10.0: right, 5.0: right.copy()}, labels) == 5.0


def test_entropy_and_losses_by_hand() -> None:
    logits = np.log(np.array([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]], np.float32))
    first, second = 1.5 * np.log(2), -(0.2 * np.log(0.1) + 0.8 * np.log(0.8))
    assert mean_entropy(logits) == pytest.approx((first + second) / 2, rel=1e-6)
    found = class_losses(logits, np.array([0, 0]))
    assert found[1:] == [None, None]
    assert found[0] == pytest.approx((np.log(2) + np.log(10)) / 2, rel=1e-6)
