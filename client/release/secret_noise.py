"""Noise that only the site can draw: the server knows the run's seed and could subtract seeded noise."""

from __future__ import annotations

import hashlib
import os
import secrets
from pathlib import Path

import numpy as np


def secret_of(folder: Path) -> bytes:
    """Return the site's secret: drawn once, kept in its folder, readable by the owner alone."""
    path = folder / "secret"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(f".{os.getpid()}")
        draft.touch(mode=0o600)
        draft.write_bytes(secrets.token_bytes(16))
        draft.replace(path)
    return path.read_bytes()


def draws(secret: bytes, hidden: np.ndarray, *place: object) -> np.random.Generator:
    """Return a generator for this place in the run and these values: the draws repeat only where both are the same.

    Without the values, two Asks at one place with a changed model would reveal the difference.
    """
    digest = hashlib.sha256(len(secret).to_bytes(4, "big") + secret)
    digest.update("/".join(map(str, place)).encode("utf-8", "surrogatepass") + b"\0")
    digest.update(np.asarray(hidden, order="C").tobytes())
    return np.random.default_rng(int.from_bytes(digest.digest(), "big"))
