"""Texts spoilt so that a model can learn to mend them: masked tokens (BERT), and spans and sentences (BART)."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int64]
MASKED, KEPT, RANDOM = 0.15, 0.1, 0.1  # of the tokens, and of the masked ones
SPOILT, SPAN = 0.3, 3.0  # share of the tokens that is taken out, mean of the Poisson lengths
IGNORED = -100


def masked(
    tokens: Tokens, open_: NDArray[np.bool_], mask: int, ordinary: Tokens, rng: np.random.Generator
) -> tuple[Tokens, Tokens]:
    """MLM: 15% of the open places are asked for; of these 80% become the mask, 10% any token, 10% stay.

    Returns the inputs, and the labels with -100 where nothing is asked.
    """
    asked = (rng.random(tokens.shape) < MASKED) & open_
    draw = rng.random(tokens.shape)
    inputs = np.where(asked & (draw >= KEPT + RANDOM), mask, tokens)
    anything = rng.choice(ordinary, size=tokens.shape)
    inputs = np.where(asked & (draw < RANDOM), anything, inputs)
    return inputs, np.where(asked, tokens, IGNORED)


def span_lengths(budget: int, rng: np.random.Generator) -> list[int]:
    """Poisson(3) lengths, none of them zero, that add up to the budget; the last one is cut to fit."""
    lengths: list[int] = []
    while budget > 0:
        if (drawn := min(int(rng.poisson(SPAN)), budget)) > 0:
            lengths.append(drawn)
            budget -= drawn
    return lengths


def shuffled_sentences(tokens: Sequence[int], ends: Collection[int], rng: np.random.Generator) -> list[int]:
    """The sentences in a random order; a sentence goes up to a token that ends one."""
    sentences: list[list[int]] = [[]]
    for token in tokens:
        sentences[-1].append(token)
        if token in ends:
            sentences.append([])
    whole = [sentence for sentence in sentences if sentence]
    return [token for number in rng.permutation(len(whole)) for token in whole[number]]


def without_spans(tokens: Sequence[int], mask: int, rng: np.random.Generator) -> list[int]:
    """30% of the tokens taken out in spans that do not overlap, one mask left for each."""
    budget = round(SPOILT * len(tokens))
    spans = span_lengths(budget, rng)
    # Every arrangement of the spans among the tokens that stay is as likely as any other.
    slots = len(tokens) - budget + len(spans)
    chosen = set(rng.choice(slots, size=len(spans), replace=False).tolist()) if spans else set()
    found, at, lengths = [], 0, iter(spans)
    for slot in range(slots):
        if slot in chosen:
            found.append(mask)
            at += next(lengths)
        else:
            found.append(tokens[at])
            at += 1
    return found


def noised(tokens: Sequence[int], ends: Collection[int], mask: int, rng: np.random.Generator) -> list[int]:
    """Denoising's input (BART): sentences in another order, then spans replaced by masks."""
    return without_spans(shuffled_sentences(tokens, ends, rng), mask, rng)
