"""Corrupted texts that a model learns to restore: masked tokens (BERT), and spans and sentences (BART)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedstill.common.data.site_tasks import padded

if TYPE_CHECKING:
    from fedstill.common.models.bert2bert import MixedModel
    from fedstill.common.models.learner import Rows
    from fedstill.common.models.tokens import Encoded

Objective = Literal["mlm", "denoising"]

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
    corrupted, at, lengths = [], 0, iter(spans)
    for slot in range(slots):
        if slot in chosen:
            corrupted.append(mask)
            at += next(lengths)
        else:
            corrupted.append(tokens[at])
            at += 1
    return corrupted


def noised(tokens: Sequence[int], ends: Collection[int], mask: int, rng: np.random.Generator) -> list[int]:
    """Denoising's input (BART): sentences in another order, then spans replaced by masks."""
    return without_spans(shuffled_sentences(tokens, ends, rng), mask, rng)


class Corrupted:
    """The private inputs, corrupted anew for every batch; the targets are the original texts."""

    def __init__(self, model: MixedModel, inputs: Encoded, objective: Objective, rng: np.random.Generator) -> None:
        self.model, self.inputs, self.objective, self.rng = model, inputs, objective, rng
        self.special = np.array(sorted(set(model.tokenizer.all_special_ids)), np.int64)
        self.ordinary = np.setdiff1d(np.arange(len(model.tokenizer)), self.special)

    @cached_property
    def ends(self) -> frozenset[int]:
        """Tokens that end a sentence."""
        vocabulary = self.model.tokenizer.get_vocab()
        return frozenset(i for token, i in vocabulary.items() if token.strip("▁Ġ#") in (".", "!", "?"))

    def __len__(self) -> int:
        return len(self.inputs)

    def batch(self, rows: Rows) -> dict[str, Tensor]:
        """Return a corrupted batch with its targets."""
        if self.objective == "mlm":
            batch = self.inputs.batch(rows)
            tokens = batch["input_ids"].numpy()
            open_ = ~np.isin(tokens, self.special) & (batch["attention_mask"].numpy() > 0)
            inputs, wanted = masked(tokens, open_, self.model.mask, self.ordinary, self.rng)
            return {**batch, "input_ids": torch.from_numpy(inputs), "masked": torch.from_numpy(wanted)}
        whole = [self._bare(int(row)) for row in rows]
        spoilt = [noised(tokens, self.ends, self.model.mask, self.rng) for tokens in whole]
        first, last = self.model.first, self.model.last
        inputs_ = [np.array([*first, *tokens, *last], np.int64) for tokens in spoilt]
        fill = self.model.tokenizer.pad_token_id or 0
        return {
            "input_ids": padded(inputs_, fill),
            "attention_mask": padded([np.ones(len(tokens), np.int64) for tokens in inputs_], 0),
            "original": padded([np.array([*tokens, *last], np.int64) for tokens in whole], IGNORED),
        }

    def _bare(self, row: int) -> list[int]:
        tokens = self.inputs.columns["input_ids"][self.inputs.starts[row] : self.inputs.starts[row + 1]]
        return [int(token) for token in tokens[~np.isin(tokens, self.special)]]
