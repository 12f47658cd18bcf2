"""Sums that hide their parts (Bonawitz et al. 2017): fixed point, masks that cancel, and shares of a secret."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from numpy.typing import NDArray

Fixed = NDArray[np.uint64]  # numbers modulo 2^64

BITS = 32  # behind the point
LARGEST = 1e6  # beyond, a number is cut; a thousand sites of such numbers still fit
PRIME = 2**521 - 1  # of the field that secrets are shared in
WIDTH = 66  # bytes of one of its numbers


def to_fixed(values: NDArray[np.floating], weight: float) -> Fixed:
    """Return weight times the values, rounded to 2^-32, modulo 2^64."""
    scaled = np.clip(np.asarray(values, np.float64), -LARGEST, LARGEST) * (weight * 2.0**BITS)
    return np.round(scaled).astype(np.int64).view(np.uint64)


def from_fixed(total: Fixed) -> NDArray[np.float64]:
    """Return a sum of fixed-point numbers as fractions."""
    return total.view(np.int64).astype(np.float64) / 2.0**BITS


def expand(seed: bytes, label: str, count: int) -> Fixed:
    """Return `count` numbers that follow from the seed and the label and are uniform to whoever lacks the seed."""
    from hashlib import blake2b

    key = blake2b(label.encode(), key=seed[:64], digest_size=32).digest()
    stream = Cipher(algorithms.ChaCha20(key, bytes(16)), None).encryptor()
    return np.frombuffer(stream.update(bytes(8 * count)), "<u8").astype(np.uint64)


def split(secret: int, holders: Sequence[int], threshold: int) -> dict[int, int]:
    """Share a secret among holders 1, 2, ... so that any `threshold` of them can join it and fewer know nothing."""
    powers = [secret, *(secrets.randbelow(PRIME) for _ in range(threshold - 1))]
    return {x: sum(a * pow(x, k, PRIME) for k, a in enumerate(powers)) % PRIME for x in holders}


def join(shares: Mapping[int, int]) -> int:
    """Join a secret from enough of its shares (Lagrange at 0)."""
    total = 0
    for x, share in shares.items():
        above = below = 1
        for other in shares:
            if other != x:
                above, below = above * -other % PRIME, below * (x - other) % PRIME
        total += share * above * pow(below, -1, PRIME)
    return total % PRIME
