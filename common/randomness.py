"""Every random draw of a run follows from its seed and from where in the run it happens, never from who came first."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_TURN = threading.RLock()  # torch has one generator a process


def derive(seed: int, *place: object) -> int:
    """A seed of its own for a place in the run, such as ("north", round 3, step 17)."""
    text = "/".join(str(part) for part in (seed, *place))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Torch draws from `seed` inside, and goes on as if nothing had happened outside; threads take turns."""
    with _TURN, torch.random.fork_rng():
        torch.manual_seed(seed)
        yield
