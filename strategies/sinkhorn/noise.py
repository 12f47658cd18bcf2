"""Probability bias: what a model says to texts that mean nothing (Confident Sinkhorns, 5.2 and appendix C.1)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fedstill.common.data.splits import Text
from fedstill.common.models.learner import Learner

Noise = Literal["vocabulary", "words"]
CHUNK = 1024
WORDS = 5000  # in the list that everybody derives from the seed


def noise_texts(tokenizer: Any, seed: int, count: int, length: int, kind: Noise, pairs: bool) -> Iterator[list[Text]]:
    """Texts of `length` tokens of the tokenizer's vocabulary, or of words that only the seed decides, in chunks."""
    rng = np.random.default_rng(seed)
    words = _words(rng) if kind == "words" else []
    ids = np.setdiff1d(np.arange(len(tokenizer)), tokenizer.all_special_ids)
    for start in range(0, count, CHUNK):
        size = (min(CHUNK, count - start) * (1 + pairs), length)
        if words:
            texts = [" ".join(words[i] for i in row) for row in rng.integers(len(words), size=size)]
        else:
            # The tokenizer puts its pieces together: joined by blanks, those of a byte-level one would be no words.
            texts = tokenizer.batch_decode(rng.choice(ids, size=size))
        if pairs:
            yield list(zip(texts[::2], texts[1::2], strict=True))
        else:
            yield list(texts)


def _words(rng: np.random.Generator) -> list[str]:
    letters = rng.integers(ord("a"), ord("z") + 1, size=(WORDS, 9), dtype=np.uint8)
    lengths = rng.integers(2, 10, size=WORDS)
    return [bytes(row[:length]).decode() for row, length in zip(letters, lengths, strict=True)]


def probability_bias(learner: Learner, seed: int, count: int, length: int, kind: Noise) -> NDArray[np.float32]:
    """B: the share of noise texts on which each class comes first."""
    model = learner.model
    classes = len(model.task.labels)
    first = np.zeros(classes, np.int64)
    for texts in noise_texts(model.tokenizer, seed, count, length, kind, len(model.task.text_columns) == 2):
        logits = learner.predict(model.encode(texts), np.arange(len(texts)))
        first += np.bincount(logits.argmax(axis=1), minlength=classes)
    return np.asarray(first / first.sum(), np.float32)
