"""Compression by singular values against numpy."""

from __future__ import annotations

import numpy as np
import pytest

from fedstill.common.maths.svd import compress, energy_share, misfits, rank_for, recompose


def test_the_rank_is_the_least_that_keeps_the_energy() -> None:
    sigma = np.array([3.0, 2.0, 1.0])  # squares 9, 4, 1 of 14
    assert [rank_for(sigma, share) for share in (0.5, 9 / 14, 0.65, 13 / 14, 0.95, 1.0)] == [1, 1, 2, 2, 3, 3]
    assert rank_for(np.zeros(3), 0.95) == 0


def test_the_share_goes_from_start_to_end() -> None:
    assert [energy_share(t / 10, 0.95, 0.98) for t in (0, 5, 10)] == pytest.approx([0.95, 0.965, 0.98])


@pytest.mark.parametrize("share", [0.5, 0.95, 0.98])
def test_what_is_recomposed_is_the_best_matrix_of_that_rank(share: float) -> None:
    rng = np.random.default_rng(0)
    decay = 0.5 ** np.arange(20)
    left, right = (np.linalg.qr(rng.normal(size=(side, 20)))[0] for side in (60, 40))
    matrix = ((left * decay) @ right.T).astype(np.float32)
    packed = compress({"w": matrix, "b": matrix[0]}, share)
    found = recompose(packed, {"w": matrix, "b": matrix[0]})
    u, sigma, v = np.linalg.svd(matrix.astype(np.float64))
    kept = np.cumsum(sigma**2) / (sigma**2).sum()
    rank = int(np.argmax(kept >= share)) + 1
    best = sum(sigma[i] * np.outer(u[:, i], v[i]) for i in range(rank))
    assert packed["w|left"].shape == (60, rank)
    assert np.allclose(found["w"], best, atol=1e-6)
    assert (found["w"] ** 2).sum() >= share * (matrix**2).sum() - 1e-6
    assert np.array_equal(found["b"], matrix[0])
    assert sum(value.nbytes for value in packed.values()) == 4 * (rank * 100 + 40)


def test_factors_go_only_where_they_are_fewer_numbers_and_zeros_cost_nothing() -> None:
    rng = np.random.default_rng(1)
    full = rng.normal(size=(8, 8)).astype(np.float32)
    cube = np.einsum("i,j,k->ijk", *(rng.normal(size=9).astype(np.float32) for _ in range(3)))
    arrays = {"full": full, "cube": cube, "still": np.zeros((30, 30), np.float32), "count": np.arange(4).reshape(2, 2)}
    packed = compress(arrays, 0.99)
    assert set(packed) == {"full", "cube|left", "cube|right", "still|left", "still|right", "count"}
    assert packed["still|left"].size == packed["still|right"].size == 0
    found = recompose(packed, arrays)
    assert not misfits(packed, arrays)
    for name, value in arrays.items():
        assert found[name].shape == value.shape
        assert np.allclose(found[name], value, atol=1e-5), name


def test_what_does_not_fit_is_named() -> None:
    like = {"w": np.zeros((6, 4)), "b": np.zeros(4)}
    good = {"w|left": np.zeros((6, 2)), "w|right": np.zeros((2, 4)), "b": np.zeros(4)}
    assert misfits(good, like) == []
    assert misfits({**good, "w|right": np.zeros((3, 4))}, like) == ["w is missing or does not make (6, 4)"]
    assert misfits({"b": np.zeros(5), "w": np.zeros((6, 4))}, like) == ["b is missing or does not make (4,)"]
    assert misfits({**good, "x": np.zeros(1)}, like) == ["x is not part of the model"]
