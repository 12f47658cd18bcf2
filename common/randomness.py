"""Every random draw of a run depends on its seed and its place in the run, never on the order of arrival."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_TURN = threading.RLock()  # torch has one generator per process


def derive(seed: int, *place: object) -> int:
    """Derive a seed for a place in the run, such as ("north", round 3, step 17)."""
    text = "/".join(str(part) for part in (seed, *place))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Let torch draw from `seed` inside, and restore its generator afterwards; threads take turns."""
    with _TURN, torch.random.fork_rng():
        torch.default_generator.manual_seed(seed)  # torch.manual_seed formats the call stack, for a CUDA to come
        if torch.cuda.is_available():
            torch.cuda.manual_seed_all(seed)
        yield
