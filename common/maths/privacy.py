"""Privacy of noisy predictions: Gaussian noise on vectors of bounded length, accounted by Opacus.

A vector of norm at most `clip` changes by at most 2 clip, whatever changes in the private texts; Gaussian noise of
`multiplier` times that makes each vector one use of the Gaussian mechanism. Uses add up over texts, rounds and runs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from fedstill.common.maths.affinity import clipped

Uses = Mapping[float, int]  # how many vectors were released under each multiplier
LEAST, MOST = 1e-3, 1e6  # multipliers that are searched
# beyond Opacus's usual orders: large ones for much noise, ones near 1 for little
ORDERS = [1 + x / 100 for x in range(1, 10)] + [1 + x / 10 for x in range(1, 100)] + list(range(11, 64))
ORDERS += [64, 96, 128, 192, 256, 512, 1024, 2048, 4096]


def hide(logits: NDArray[np.float32], clip: float, multiplier: float, rng: np.random.Generator) -> NDArray[np.float32]:
    """Centre the logits, clip each text's vector to the norm `clip`, and add noise of 2 clip times the multiplier."""
    centred = clipped(logits - logits.mean(axis=-1, keepdims=True), clip)
    return np.asarray(centred + rng.standard_normal(centred.shape) * (2 * clip * multiplier), np.float32)


def epsilon_of(uses: Uses, delta: float) -> float:
    """Return the epsilon of everything released, at this delta (Renyi accounting)."""
    from opacus.accountants.analysis import rdp

    total = sum(
        np.asarray(rdp.compute_rdp(q=1.0, noise_multiplier=multiplier, steps=count, orders=ORDERS))
        for multiplier, count in uses.items()
        if count
    )
    if np.ndim(total) == 0:
        return 0.0
    return max(0.0, float(rdp.get_privacy_spent(orders=ORDERS, rdp=total, delta=delta)[0]))


def multiplier_for(predictions: int, epsilon: float, delta: float) -> float:
    """Return the least noise, to a thousandth, with which so many predictions cost at most epsilon."""
    low, high = LEAST, MOST
    if epsilon_of({high: predictions}, delta) > epsilon:
        raise ValueError(f"no noise makes {predictions:,} predictions cost only epsilon = {epsilon}")
    while high / low > 1.001:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if epsilon_of({middle: predictions}, delta) <= epsilon else (middle, high)
    return high
