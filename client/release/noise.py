"""Noise that nobody else can draw: fresh from the system's generator for every answer, never from the run's seed."""

from __future__ import annotations

import os

import numpy as np
from numpy.typing import NDArray


def standard_normal(shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Draw from the standard normal distribution; no state is kept, so no draw follows from another."""
    from scipy.special import ndtri

    count = int(np.prod(shape))
    drawn = np.frombuffer(os.urandom(8 * count), np.uint64) >> np.uint64(11)
    return np.asarray(ndtri((drawn.astype(np.float64) + 0.5) * 2.0**-53), np.float64).reshape(shape)
