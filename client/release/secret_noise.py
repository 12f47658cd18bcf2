"""Noise that only the site can draw: the server knows the run's seed, and could take seeded noise off again."""

from __future__ import annotations

import hashlib
import os
import secrets
from pathlib import Path

import numpy as np


def secret_of(folder: Path) -> bytes:
    """Drawn once, kept in the site's folder, readable by its owner alone."""
    path = folder / "secret"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(f".{os.getpid()}")
        draft.touch(mode=0o600)
        draft.write_bytes(secrets.token_bytes(16))
        draft.replace(path)
    return path.read_bytes()


def draws(secret: bytes, hidden: np.ndarray, *place: object) -> np.random.Generator:
    """Draws of this place in the run for what is to be hidden: the same again only where both are the same.

    Were the numbers left out, asking twice at one place while the model changes would give the difference away.
    """
    digest = hashlib.sha256(len(secret).to_bytes(4, "big") + secret)
    digest.update("/".join(map(str, place)).encode("utf-8", "surrogatepass") + b"\0")
    digest.update(np.asarray(hidden, order="C").tobytes())
    return np.random.default_rng(int.from_bytes(digest.digest(), "big"))
