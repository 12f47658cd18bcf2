"""Texts tokenized once, stored compactly, and padded batch by batch."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self
from weakref import ref

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedstill.common.data.splits import Text, TextSet

CHUNK = 1024
REMEMBERED = 64 << 20  # bytes of tokens: sites of one process read the same public and test texts


@dataclass(frozen=True)
class Encoded:
    """Token numbers of all texts end to end; text i is `columns[name][starts[i]:starts[i + 1]]`."""

    columns: dict[str, NDArray[np.int32]]
    starts: NDArray[np.int64]
    padding: dict[str, int]
    left: bool

    def __len__(self) -> int:
        return len(self.starts) - 1

    def lengths(self) -> NDArray[np.int64]:
        """Return the number of tokens of every text."""
        return np.diff(self.starts)

    def followed_by(self, second: Encoded) -> Self:
        """Concatenate two sets of the same tokenizer."""
        columns = {name: np.concatenate([values, second.columns[name]]) for name, values in self.columns.items()}
        return replace(self, columns=columns, starts=np.concatenate([self.starts, self.starts[-1] + second.starts[1:]]))

    def hashes(self) -> list[bytes]:
        """Return a name for each text that says all the model reads of it."""
        if not len(self):
            return []
        parts = [np.split(values, self.starts[1:-1]) for values in self.columns.values()]
        texts = zip(*parts, strict=True)
        return [hashlib.sha256(b"/".join(column.tobytes() for column in text)).digest() for text in texts]

    def places(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
        """Return where the rows' tokens stand in a padded batch (rows x longest), and where in `columns`."""
        lengths = self.starts[rows + 1] - self.starts[rows]
        longest = int(lengths.max(initial=1))
        column = np.arange(longest)
        offset = (longest - lengths)[:, None] if self.left else np.zeros((len(rows), 1), np.int64)
        mask = (column >= offset) & (column < offset + lengths[:, None])
        return mask, (self.starts[rows][:, None] + column - offset)[mask]

    def nbytes(self) -> int:
        """Return what the tokens take in memory."""
        return self.starts.nbytes + sum(values.nbytes for values in self.columns.values())

    def batch(self, rows: Sequence[int] | NDArray[np.int64]) -> dict[str, Tensor]:
        """Return the rows as tensors, padded to the longest on the side that the model expects."""
        mask, place = self.places(np.asarray(rows, dtype=np.int64))
        tensors = {"attention_mask": torch.from_numpy(mask.astype(np.int64))}
        for name, values in self.columns.items():
            padded = np.full(mask.shape, self.padding[name], np.int64)
            padded[mask] = values[place]
            tensors[name] = torch.from_numpy(padded)
        return tensors


def onto(batch: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Return the batch on that device; a copy to CUDA starts from pinned memory, and the CPU does not wait for it."""
    if device.type != "cuda":
        return {name: tensor.to(device) for name, tensor in batch.items()}
    here = {name: tensor.pin_memory() if tensor.device.type == "cpu" else tensor for name, tensor in batch.items()}
    return {name: tensor.to(device, non_blocking=True) for name, tensor in here.items()}


def encode(tokenizer: Any, texts: Sequence[Text], max_length: int) -> Encoded:
    """Tokenize every text, cut to `max_length`; a text without tokens becomes one unknown (or padding) token."""
    names = [name for name in ("input_ids", "token_type_ids") if name in tokenizer.model_input_names]
    spare = next((i for i in (tokenizer.unk_token_id, tokenizer.pad_token_id) if i is not None), 0)
    columns: dict[str, list[NDArray[np.int32]]] = {name: [] for name in names}
    lengths: list[int] = []
    for start in range(0, len(texts), CHUNK):
        chunk = texts[start : start + CHUNK]
        firsts = [text if isinstance(text, str) else text[0] for text in chunk]
        pairs = [text[1] for text in chunk if not isinstance(text, str)]
        if pairs and len(pairs) < len(chunk):
            raise ValueError("single texts and pairs are mixed in one set; give every text one part, or two")
        rows = tokenizer(firsts, pairs or None, truncation=True, max_length=max_length, padding=False, verbose=False)
        for name in names:
            empty = [spare] if name == "input_ids" else [0]
            columns[name] += [np.array(row or empty, np.int32) for row in rows[name]]
        lengths += [max(len(row), 1) for row in rows["input_ids"]]
    padding = {"input_ids": tokenizer.pad_token_id or 0, "token_type_ids": tokenizer.pad_token_type_id}
    return Encoded(
        {name: np.concatenate([np.empty(0, np.int32), *parts]) for name, parts in columns.items()},
        np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64),
        {name: padding[name] for name in names},
        tokenizer.padding_side == "left",
    )


class Remembered:
    """Sets of texts that were tokenized in this process, least recently used first, up to a number of bytes.

    A tokenizer that nobody else holds any more is not kept alive, and its sets are forgotten.
    """

    def __init__(self, most: int = REMEMBERED) -> None:
        self.most, self.held = most, 0
        self._sets: OrderedDict[tuple[Any, ...], Encoded] = OrderedDict()

    def encode(self, tokenizer: Any, texts: Sequence[Text], max_length: int) -> Encoded:
        """As `encode`; the same texts for the same tokenizer are one object."""
        place = (ref(tokenizer), tokenizer.truncation_side, max_length, TextSet(tuple(texts)).fingerprint())
        if place in self._sets:
            self._sets.move_to_end(place)
            return self._sets[place]
        encoded = encode(tokenizer, texts, max_length)
        for gone in [each for each in self._sets if each[0]() is None]:
            self.held -= self._sets.pop(gone).nbytes()
        if encoded.nbytes() <= self.most:
            self._sets[place] = encoded
            self.held += encoded.nbytes()
        while self.held > self.most:
            self.held -= self._sets.popitem(last=False)[1].nbytes()
        return encoded
