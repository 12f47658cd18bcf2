"""Privacy by noise: Gaussian noise on vectors of bounded length, accounted by Opacus.

A vector of norm at most `clip` changes by at most 2 clip, whatever changes in the private texts; Gaussian noise of
`multiplier` times that makes each vector one use of the Gaussian mechanism. Uses add up over texts, rounds and runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedstill.common.maths.affinity import clipped


class Use(NamedTuple):
    """A kind of noise: its deviation in units of the sensitivity, and the share of the texts that each use samples."""

    multiplier: float
    rate: float = 1.0


Uses = Mapping[Use, int]  # how often each kind was used
Draw = Callable[[tuple[int, ...]], NDArray[np.float64]]  # from the standard normal distribution
LEAST, MOST = 1e-3, 1e6  # multipliers that are searched
LEAST_SAMPLED = 0.2  # below, the accountant's sums over a sample's orders overflow
GRID = 16  # bits of the noise's deviation that are left by rounding
# beyond Opacus's usual orders: large ones for much noise, ones near 1 for little
ORDERS = [1 + x / 100 for x in range(1, 10)] + [1 + x / 10 for x in range(1, 100)] + list(range(11, 64))
ORDERS += [64, 96, 128, 192, 256, 512, 1024, 2048, 4096]


def hide(logits: NDArray[np.floating], clip: float, multiplier: float, draw: Draw) -> NDArray[np.float32]:
    """Centre the logits, clip each text's vector to the norm `clip`, and add noise of 2 clip times the multiplier.

    A vector that is not finite counts as zeros: NaN would pass through clipping and noise and be seen. The sums are
    rounded to a grid that depends on the noise alone, so that their low bits tell nothing.
    """
    wide = np.asarray(logits, np.float64)
    wide = np.where(np.isfinite(wide).all(axis=-1, keepdims=True), wide, 0.0)
    deviation = 2 * clip * multiplier
    grid = 2.0 ** (math.floor(math.log2(deviation)) - GRID)
    noisy = clipped(wide - wide.mean(axis=-1, keepdims=True), clip) + draw(wide.shape) * deviation
    return np.asarray(np.round(noisy / grid) * grid, np.float32)


def epsilon_of(uses: Uses, delta: float) -> float:
    """Return the epsilon of everything released, at this delta (Renyi accounting)."""
    from opacus.accountants.analysis import rdp

    total = sum(
        np.asarray(rdp.compute_rdp(q=use.rate, noise_multiplier=use.multiplier, steps=count, orders=ORDERS))
        for use, count in uses.items()
        if count
    )
    if np.ndim(total) == 0:
        return 0.0
    return max(0.0, float(rdp.get_privacy_spent(orders=ORDERS, rdp=total, delta=delta)[0]))


def multiplier_for(count: int, epsilon: float, delta: float, rate: float = 1.0) -> float:
    """Return the least noise, to a thousandth, with which so many uses (predictions, steps) cost at most epsilon."""
    low, high = LEAST if rate == 1.0 else LEAST_SAMPLED, MOST
    if epsilon_of({Use(high, rate): count}, delta) > epsilon:
        raise ValueError(f"no noise makes {count:,} predictions or steps cost only epsilon = {epsilon}")
    while high / low > 1.001:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if epsilon_of({Use(middle, rate): count}, delta) <= epsilon else (middle, high)
    return high
