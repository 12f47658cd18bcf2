"""Aggregation rules and class weights on numbers worked out by hand."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedstill.common.maths.ensemble import by_class, mean_predictions
from fedstill.common.maths.robust import (
    RULES,
    Aggregation,
    agreement,
    biweight,
    combine,
    cronus,
    cronus_filter,
    krum,
    krum_scores,
    median,
    spectral,
    trimmed_mean,
    weighted_median,
)

# five sites, one text, two classes; the last one lies
SAID = np.array([[[0.70, 0.30]], [[0.80, 0.20]], [[0.75, 0.25]], [[0.65, 0.35]], [[0.0, 1.0]]], np.float32)
NAMES = ("a", "b", "c", "d", "liar")


def test_the_mean_follows_the_weights_and_the_other_rules_count_every_site_once() -> None:
    said = {"a": np.array([[1.0, 3.0]], np.float32), "b": np.array([[5.0, -1.0]], np.float32)}
    weights = {"a": 0.25, "b": 0.75}
    assert combine(said, weights).tolist() == [[4.0, 0.0]]
    rules: list[Aggregation] = ["median", "trimmed", "cronus", "krum", "spectral"]  # of two sites nobody is the odd one
    assert all(combine(said, weights, rule).tolist() == [[3.0, 1.0]] for rule in rules)


def test_only_those_with_a_weight_are_combined() -> None:
    said = dict(zip(NAMES, SAID, strict=True))
    assert np.allclose(combine(said, {"a": 0.5, "d": 0.5}, "median"), [[0.675, 0.325]])


def test_median_and_trimmed_mean_by_hand() -> None:
    assert np.allclose(median(SAID), [[0.70, 0.30]])
    # without the highest and the lowest of each class: (.65 + .70 + .75) / 3 and (.25 + .30 + .35) / 3
    assert np.allclose(trimmed_mean(SAID), [[0.70, 0.30]])
    assert np.allclose(trimmed_mean(SAID, share=0.4), median(SAID))  # two of each end leave the middle one
    assert np.allclose(trimmed_mean(SAID[:1]), SAID[0])


def test_cronus_drops_the_planted_outlier_and_no_honest_site() -> None:
    assert cronus_filter(SAID)[:, 0].tolist() == [True, True, True, True, False]
    assert np.allclose(cronus(SAID), [[0.725, 0.275]])  # the mean of the other four
    assert np.allclose(cronus(10 * SAID), [[7.25, 2.75]])  # logits have no scale of their own
    assert cronus_filter(SAID[:4]).all()


def test_cronus_drops_two_who_lie_alike_but_never_a_majority() -> None:
    honest = np.array([[0.6, 0.4], [0.62, 0.38], [0.64, 0.36], [0.66, 0.34], [0.68, 0.32]], np.float32)
    lies = np.array([[0.0, 1.0], [0.02, 0.98]], np.float32)
    assert cronus_filter(np.concatenate([lies, honest])[:, None]).sum() == 5
    assert np.allclose(cronus(np.concatenate([lies, honest])[:, None]), [[0.64, 0.36]])
    most = np.array([[[0.0, 1.0]], [[1.0, 0.0]], [[1.0, 0.0]]], np.float32)
    assert cronus_filter(most)[:, 0].tolist() == [False, True, True]
    assert cronus_filter(most[:2]).all()


def test_krum_by_hand() -> None:
    # one text, one class: 0, 1, 2, 4 and 100; one may lie, so that each counts its 5 - 1 - 2 = 2 nearest
    stack = np.array([0.0, 1.0, 2.0, 4.0, 100.0], np.float32)[:, None, None]
    assert krum_scores(stack).tolist() == [1 + 4, 1 + 1, 1 + 4, 4 + 9, 96**2 + 98**2]
    assert krum(stack).tolist() == [[(0 + 1 + 2 + 4) / 4]]  # all but the one that may lie, the farthest
    assert np.allclose(krum(stack, liars=0), [[21.4]])
    # a site is judged by all texts together: the liar is honest on the first
    both = np.concatenate([np.ones_like(stack), stack], axis=1)
    assert krum(both).tolist() == [[1.0], [1.75]]
    seven = np.array([0.0, 1.0, 2.0, 3.0, 4.0, 50.0, 50.0], np.float32)[:, None, None]  # two who agree with each other
    assert krum(seven).tolist() == [[2.0]]


def test_krum_of_many_sites_takes_little_memory() -> None:
    stack = np.random.default_rng(0).normal(size=(128, 160, 2))
    tracemalloc.start()
    scores = krum_scores(stack)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 6 * stack.nbytes  # differences of all pairs of sites would be 128 times the stack
    flat = stack.reshape(128, -1)
    distances = np.sort(((flat[:, None] - flat[None]) ** 2).sum(axis=-1), axis=1)
    assert np.allclose(scores, distances[:, 1 : 128 - 62 - 2 + 1].sum(axis=1), rtol=1e-13, atol=0)


def test_krum_tells_honest_sites_apart_beside_one_that_says_huge_numbers() -> None:
    stack = np.random.default_rng(0).normal(size=(9, 100, 2))
    without = krum_scores(stack[:8], liars=2)
    stack[8] = 1e12
    assert np.allclose(krum_scores(stack, liars=3)[:8], without, rtol=1e-12)  # of the same four nearest


def test_spectral_by_hand() -> None:
    # four sites know the same, one with a bias and a loud voice, one with a bias, one says the opposite, louder still
    h = np.array([[1.0, -1.0], [-1.0, 1.0], [1.0, -1.0], [-1.0, 1.0]])
    stack = np.stack([h, 3 * h + np.array([6.0, 0.0]), h + np.array([0.0, 2.0]), -20 * h]).astype(np.float32)
    # each is h or -h once offset and spread are put aside: correlations 1 among three of them and -1 with the liar
    assert np.allclose(agreement(stack), [0.5, 0.5, 0.5, -0.5])
    # of the offsets (0, 0), (6, 0), (0, 2) and the spreads 1, 3, 1 most are 0 and 1
    assert np.allclose(spectral(stack), h, atol=1e-6)
    most = stack[[0, 3, 3, 3]]  # where most lie, they are believed
    assert np.allclose(spectral(most), -20 * h, atol=1e-5)
    one = stack[:, :1]  # a single text tells nothing about the sites
    assert np.allclose(spectral(one), biweight(one[:, 0].astype(np.float64), np.ones(4)))


def test_the_usual_value_by_hand_and_by_scipy() -> None:
    from scipy.optimize import brentq

    values = np.array([[1.0], [2.0], [4.0], [100.0]])
    assert weighted_median(values, np.ones(4)).tolist() == [3.0]  # half of the weight on either side
    assert weighted_median(values, np.array([1.0, 3.0, 1.0, 0.5])).tolist() == [2.0]
    weights = np.array([1.0, 2.0, 1.0, 1.0])
    # median 2, distances 1, 0, 2, 98, of which the median by weight is 1: beyond 4.685 x 1.4826 nothing counts
    reach = 4.685 * 1.4826

    def slope(middle: float) -> float:
        u = np.clip((values[:, 0] - middle) / reach, -1, 1)
        return float((weights * u * (1 - u**2) ** 2).sum())

    assert biweight(values, weights)[0] == pytest.approx(brentq(slope, 1.0, 4.0), abs=1e-6)
    assert biweight(np.array([[5.0], [5.0], [9.0]]), np.ones(3)).tolist() == [5.0]


def test_agreement_finds_how_good_each_site_is_without_an_answer() -> None:
    rng = np.random.default_rng(3)
    right = np.array([0.9, 0.8, 0.7, 0.6, 0.5, 0.2])  # the last one mostly says the opposite
    answers = rng.integers(0, 2, 20_000)
    said = np.where(rng.random((6, 20_000)) < right[:, None], answers, 1 - answers)
    found = agreement(np.eye(2, dtype=np.float32)[said])
    # Parisi et al. 2014: in proportion to 2 p - 1
    expected = 2 * right - 1
    assert np.allclose(found / np.linalg.norm(found), expected / np.linalg.norm(expected), atol=0.03)


def test_spectral_stands_four_of_ten_who_say_the_opposite() -> None:
    rng = np.random.default_rng(4)
    truth = rng.normal(size=(400, 2))
    honest = truth + rng.normal(scale=2.0, size=(10, 400, 2))
    said = honest.copy()
    said[:4] *= -1
    right = truth.argmax(axis=1)
    accuracy = {rule: float((RULES[rule](said.astype(np.float32)).argmax(axis=1) == right).mean()) for rule in RULES}
    best = float((honest[4:].mean(axis=0).argmax(axis=1) == right).mean())  # of somebody who knows who lies
    assert accuracy["spectral"] > best - 0.02
    assert max(accuracy[rule] for rule in ("median", "trimmed", "cronus")) < best - 0.1


def test_each_text_is_filtered_by_itself() -> None:
    other = SAID[[4, 0, 1, 2, 3]]  # on the second text the first site is the odd one
    kept = cronus_filter(np.concatenate([SAID, other], axis=1))
    assert kept.T.tolist() == [[True, True, True, True, False], [False, True, True, True, True]]


# --- many sites at once, and each rule as its definition says, one text or one pair of sites at a time ---


def plain_cronus(points: np.ndarray, bound: float = 4.0) -> set[int]:
    """The sites that are kept on one text."""
    kept = list(range(len(points)))
    for _ in range((len(points) - 1) // 2):
        centred = points[kept] - points[kept].mean(axis=0)
        values, vectors = np.linalg.eigh(centred.T @ centred / len(kept))
        projection = centred @ vectors[:, -1]
        distance = np.abs(projection - np.median(projection))
        if values[-1] <= max(bound * (1.4826 * np.median(distance)) ** 2, 1e-12):
            break
        del kept[int(np.argmax(distance))]
    return set(kept)


def plain_agreement(stack: np.ndarray) -> np.ndarray:
    """The entries of the first eigenvector, from all eigenvectors."""
    rest = stack - stack.mean(axis=1, keepdims=True)
    rest -= rest.mean(axis=-1, keepdims=True)
    flat = rest.reshape(len(stack), -1)
    flat = flat / np.sqrt((flat**2).mean(axis=1, keepdims=True))
    correlation, shared = flat @ flat.T / flat.shape[1], np.zeros(len(stack))
    for _ in range(20):
        np.fill_diagonal(correlation, shared)
        values, vectors = np.linalg.eigh(correlation)
        shared = np.minimum(values[-1] * vectors[:, -1] ** 2, 1.0)
    first: np.ndarray = vectors[:, -1]
    return first * np.sign(np.sign(first).sum())  # the majority is honest


@pytest.mark.parametrize("liars", [0, 20, 31])
def test_rules_for_many_sites_give_what_their_definitions_give(liars: int) -> None:
    rng = np.random.default_rng(liars)
    answer = rng.normal(size=(130, 3))  # more texts than Cronus filters at a time
    stack = answer + rng.normal(size=(70, 130, 3))
    stack[:liars] = 5 * np.roll(answer, 1, axis=1) + 0.1 * rng.normal(size=(liars, 130, 3))
    near = {"rtol": 0, "atol": 1e-11}
    assert np.allclose(median(stack), np.median(stack, axis=0), **near)
    assert np.array_equal(median(stack[:69]), np.median(stack[:69], axis=0))
    assert np.allclose(trimmed_mean(stack), np.sort(stack, axis=0)[14:-14].mean(axis=0), **near)
    kept = cronus_filter(stack)
    assert [set(np.flatnonzero(row).tolist()) for row in kept.T] == [plain_cronus(stack[:, i]) for i in range(130)]
    assert liars == 0 or not kept.all()
    apart = [sorted(float(((a - b) ** 2).sum()) for b in stack) for a in stack]
    near_ones = 70 - 33 - 2
    assert np.allclose(krum_scores(stack), [sum(row[1 : near_ones + 1]) for row in apart], rtol=1e-12)
    found, wanted = agreement(stack), plain_agreement(stack)
    assert np.allclose(found, wanted, rtol=0, atol=1e-9)


def test_agreement_of_many_sites_in_two_camps_of_one_size() -> None:
    """No power of the matrix tells two equal eigenvalues apart: all eigenvectors are computed then."""
    rng = np.random.default_rng(2)
    camps = rng.normal(size=(2, 2000, 2))
    stack = np.concatenate([camp + 0.01 * rng.normal(size=(20, 2000, 2)) for camp in camps])
    found, wanted = agreement(stack), plain_agreement(stack)
    assert np.allclose(np.abs(found), np.abs(wanted), rtol=0, atol=1e-6)


def test_probabilities_sum_to_one_under_every_rule() -> None:
    said = dict(zip("abc", np.eye(3, dtype=np.float32)[:, None] * 0.7 + 0.1, strict=True))
    weights = dict.fromkeys("abc", 1 / 3)
    assert median(np.stack(list(said.values()))).sum() == pytest.approx(0.3)
    assert np.allclose(combine(said, weights, "median", probabilities=True), 1 / 3)
    rng = np.random.default_rng(5)
    many = {name: rng.dirichlet([0.2] * 3, size=20).astype(np.float32) for name in "abcde"}
    for rule in ("mean", *sorted(RULES)):
        found = combine(many, dict.fromkeys("abcde", 0.2), rule, probabilities=True)  # type: ignore[arg-type]
        assert (found >= 0).all()
        assert np.allclose(found.sum(axis=1), 1.0, atol=1e-5)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 7), st.integers(0, 2**31), st.sampled_from(sorted(RULES)))
def test_a_rule_does_not_mind_the_order_of_sites_and_moves_with_its_input(sites: int, seed: int, rule: str) -> None:
    rng = np.random.default_rng(seed)
    stack = rng.normal(size=(sites, 4, 3)).astype(np.float32)
    found = RULES[rule](stack)
    assert found.shape == (4, 3)
    assert found.dtype == np.float32
    assert np.allclose(RULES[rule](stack[rng.permutation(sites)]), found, atol=1e-5)
    assert np.allclose(RULES[rule](stack + 2), found + 2, atol=1e-5)
    same = np.repeat(stack[:1], sites, axis=0)
    assert np.allclose(RULES[rule](same), stack[0], atol=1e-6)


def test_class_weights_by_hand_with_a_class_that_one_site_lacks_and_one_that_all_lack() -> None:
    weights = by_class({"a": np.array([30, 0, 0]), "b": np.array([10, 20, 0])})
    assert weights["a"].tolist() == [0.75, 0.0, 0.5]
    assert weights["b"].tolist() == [0.25, 1.0, 0.5]
    z = mean_predictions(
        {"a": np.array([[4.0, 9.0, 1.0]], np.float32), "b": np.array([[8.0, 2.0, 3.0]], np.float32)}, weights
    )
    assert z.tolist() == [[5.0, 2.0, 2.0]]


def test_class_weights_are_those_of_who_answered() -> None:
    assert by_class({"b": np.array([10, 20, 0])})["b"].tolist() == [1.0, 1.0, 1.0]


def test_votes_for_as_many_classes_as_sites_are_their_mean_under_the_median() -> None:
    votes = {name: np.eye(3, dtype=np.float32)[[k, 0]] for k, name in enumerate("abc")}
    found = combine(votes, dict.fromkeys("abc", 1.0), "median", probabilities=True)
    assert found.tolist() == [pytest.approx([1 / 3, 1 / 3, 1 / 3]), [1.0, 0.0, 0.0]]
