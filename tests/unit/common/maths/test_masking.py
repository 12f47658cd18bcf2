"""Fixed point, masks and shares of secrets: numbers by hand, and what fewer than enough shares tell."""

from __future__ import annotations

import secrets

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedstill.common.maths.masking import BITS, PRIME, expand, from_fixed, join, split, to_fixed


def test_a_sum_in_fixed_point_is_the_sum_to_its_precision() -> None:
    rng = np.random.default_rng(1)
    parts = [rng.normal(scale=100, size=(5, 7)) for _ in range(10)]
    total = sum((to_fixed(part, 0.1) for part in parts), np.zeros((5, 7), np.uint64))
    assert np.abs(from_fixed(total) - sum(parts) / 10).max() <= 10 * 2.0 ** -(BITS + 1)
    assert np.array_equal(from_fixed(to_fixed(np.array([-1.5, 0.25, 1e6, 1e9]), 1.0)), [-1.5, 0.25, 1e6, 1e6])


def test_masks_follow_from_seed_and_label_and_are_uniform() -> None:
    seed = secrets.token_bytes(32)
    assert np.array_equal(expand(seed, "a", 9), expand(seed, "a", 9))
    assert not np.array_equal(expand(seed, "a", 9), expand(seed, "b", 9))
    many = expand(seed, "a", 100_000)
    counts = np.bincount((many >> np.uint64(56)).astype(np.int64), minlength=256)
    assert abs(counts - 100_000 / 256).max() < 6 * np.sqrt(100_000 / 256)


@given(st.integers(0, 2**256 - 1), st.integers(3, 9), st.data())
def test_any_enough_of_the_shares_make_the_secret(secret: int, count: int, data: st.DataObject) -> None:
    threshold = count // 2 + 1
    shares = split(secret, range(1, count + 1), threshold)
    some = data.draw(st.permutations(sorted(shares)))[:threshold]
    assert join({x: shares[x] for x in some}) == secret


def test_fewer_shares_fit_every_secret() -> None:
    shares = split(42, range(1, 6), 3)
    two = {x: shares[x] for x in (1, 4)}
    for guess in (0, 42, 10**50):  # a third share that makes this guess right exists, so two tell nothing
        third = (guess - join({**two, 5: 0})) * pow(join({1: 0, 4: 0, 5: 1}), -1, PRIME) % PRIME
        assert join({**two, 5: third}) == guess % PRIME


@pytest.mark.parametrize("count", [3, 5])
def test_too_few_shares_do_not_make_the_secret(count: int) -> None:
    shares = split(7, range(1, count + 1), count)
    assert join({x: shares[x] for x in list(shares)[:-1]}) != 7
