"""Masking rates and span lengths by their statistics."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fedstill.strategies.atc.corruption import masked, noised, shuffled_sentences, span_lengths, without_spans

MASK, ORDINARY = 1, np.arange(10, 1000)


def test_fifteen_percent_are_asked_for_eighty_ten_ten() -> None:
    rng = np.random.default_rng(3)
    tokens = rng.choice(ORDINARY, size=(400, 500))
    open_ = np.ones(tokens.shape, bool)
    open_[:, 0] = False  # such as [CLS]
    inputs, wanted = masked(tokens, open_, MASK, ORDINARY, rng)
    asked = wanted >= 0
    assert not asked[:, 0].any()
    assert np.array_equal(inputs[~asked], tokens[~asked])
    assert np.array_equal(wanted[asked], tokens[asked])
    count = asked.sum()  # about 30,000: 5 standard deviations are 0.004 of the share, 0.012 of its parts
    assert count / open_.sum() == pytest.approx(0.15, abs=0.004)
    assert (inputs[asked] == MASK).sum() / count == pytest.approx(0.8, abs=0.012)
    assert (inputs[asked] == tokens[asked]).sum() / count == pytest.approx(0.1, abs=0.012)
    other = (inputs[asked] != MASK) & (inputs[asked] != tokens[asked])
    assert other.sum() / count == pytest.approx(0.1, abs=0.012)
    assert np.isin(inputs[asked][other], ORDINARY).all()


def test_span_lengths_are_poisson_without_zeros_and_fill_the_budget() -> None:
    lengths = np.array(span_lengths(100_000, np.random.default_rng(4)))
    assert lengths.sum() == 100_000
    assert lengths.min() == 1
    seen = len(lengths)
    zero = math.exp(-3)
    assert lengths.mean() == pytest.approx(3 / (1 - zero), abs=0.05)
    for length in range(1, 7):
        share = math.exp(-3) * 3**length / math.factorial(length) / (1 - zero)
        assert (lengths == length).sum() / seen == pytest.approx(share, abs=0.015)


def test_thirty_percent_go_in_spans_with_one_mask_each() -> None:
    rng = np.random.default_rng(5)
    tokens = list(range(10, 210))
    gaps, masks = [], []
    for _ in range(200):
        found = without_spans(tokens, MASK, rng)
        kept = [token for token in found if token != MASK]
        assert len(kept) == 140
        assert kept == sorted(kept)
        masks.append(len(found) - len(kept))
        gaps.append(set(tokens) - set(kept))
    assert np.mean(masks) == pytest.approx(60 / (3 / (1 - math.exp(-3))), rel=0.05)
    taken = np.array([[token in gap for token in tokens] for gap in gaps]).mean(axis=0)
    assert taken[50:150].mean() == pytest.approx(0.3, abs=0.03)  # the middle is as likely as the whole
    assert without_spans([7], MASK, rng) == [7]


def test_sentences_are_moved_whole() -> None:
    end, rng = 9, np.random.default_rng(6)
    sentences = [[11, 12, end], [13, end], [14, 15, 16, end], [17]]
    orders = set()
    for _ in range(200):
        found = shuffled_sentences([token for sentence in sentences for token in sentence], {end}, rng)
        text = ",".join(map(str, found))
        assert all(",".join(map(str, sentence)) in text for sentence in sentences)
        assert len(found) == 10
        orders.add(text)
    assert len(orders) == 24
    assert sorted(noised([11, 12, end], {end}, MASK, rng)) != [9, 11, 12]
