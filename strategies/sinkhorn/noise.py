"""Probability bias: a model's predictions for meaningless texts (Confident Sinkhorns, 5.2 and appendix C.1)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from fedstill.common.data.splits import Text
from fedstill.common.models.learner import Learner
from fedstill.common.wire import Reply, WireError
from fedstill.common.wire.typed import Message
from fedstill.strategies.verbs import site_verb

if TYPE_CHECKING:
    from fedstill.client.node import Node

Noise = Literal["vocabulary", "words"]
CHUNK = 1024
WORDS = 5000  # in the list that everybody derives from the seed


@dataclass(frozen=True)
class Probe(Message):
    """Which noise texts to draw; the seed travels, the texts never do."""

    seed: int
    count: int
    length: int
    noise: Noise = "vocabulary"


@dataclass(frozen=True)
class Bias(Message):
    """B_k: C shares."""

    bias: np.ndarray
    texts: int


def shares_of(classes: int) -> Callable[[Reply], None]:
    """Return a check of a bias: shares of the classes that sum to 1."""

    def check(reply: Reply) -> None:
        bias = reply.arrays.get("bias")
        if bias is None or bias.shape != (classes,) or bias.min() < 0 or abs(float(bias.sum()) - 1) > 1e-3:
            raise WireError(f"a probability bias must be {classes} shares that sum to 1, got {bias}")

    return check


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


# --- the site's half ---

MOST_NOISE = 100_000_000  # tokens that a site draws for one Ask


@site_verb("query.bias", leaves="predictions", phase="noise probing")
def probe_bias(site: Node, asked: Probe) -> Bias:
    """B_k on noise texts that are drawn here from the seed (5.2); C numbers travel."""
    if asked.seed < 0 or not 1 <= asked.count * asked.length <= MOST_NOISE:
        raise WireError(f"no noise can be drawn for {asked}; at most {MOST_NOISE:,} tokens in all")
    bias = probability_bias(site.learner, asked.seed, asked.count, asked.length, asked.noise)
    return Bias(bias, len(site.private))
