"""What the teacher, MiniLM, says of every text: worked out once, kept on disk, read by every student."""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from texts import WORD
from torch import Tensor
from transformers import AutoModel, AutoTokenizer

from fedstill.common.models.builtin import minilm_folder

LENGTH = 64
WIDTH = 384
WORD_LAYERS = (3, 5)  # whose states of every word are kept
LAYERS = 6
BATCH = 64


@dataclass(frozen=True)
class Lessons:
    """Vectors of the texts (texts x layers 0 to 6 x width) and of their words, text i's at starts[i]:starts[i + 1]."""

    sentences: np.ndarray
    words: np.ndarray
    starts: np.ndarray


def words_of_tokens(text: str, offsets: list[tuple[int, int]]) -> list[int]:
    """The number of the word that each token ends in, -1 for a token without letters of the text."""
    word_at = np.full(len(text) + 1, -1)
    for number, match in enumerate(WORD.finditer(text)):
        word_at[match.start() : match.end()] = number
    return [int(word_at[end - 1]) if end > start else -1 for start, end in offsets]


def averaging(words: Tensor, count: int) -> Tensor:
    """Matrices (texts x count x tokens) that turn states of tokens into means over each word's tokens.

    `words` numbers the word of every token, -1 where there is none. A word without a token gets zeros.
    """
    hot = torch.zeros(len(words), count + 1, words.shape[1])
    hot.scatter_(1, words.clamp(max=count).remainder(count + 1).unsqueeze(1), 1.0)  # -1 goes to the last row
    hot = hot[:, :count]
    return hot / hot.sum(dim=2, keepdim=True).clamp(min=1)


def lessons(texts: list[str], folder: Path) -> Lessons:
    """Read them from the folder, or make them there: about 15 minutes on one core for 60,000 texts."""
    digest = hashlib.sha256(json.dumps([texts, LENGTH, WORD_LAYERS]).encode()).hexdigest()
    note = folder / "lessons.json"
    counts = [len(WORD.findall(text)) for text in texts]
    starts = np.concatenate([[0], np.cumsum(counts)])
    sizes = {"sentences": (len(texts), LAYERS + 1, WIDTH), "words": (int(starts[-1]), len(WORD_LAYERS), WIDTH)}
    if not note.is_file() or json.loads(note.read_text())["sha256"] != digest:
        folder.mkdir(parents=True, exist_ok=True)
        _ask(texts, starts, {name: _open(folder, name, size, "w+") for name, size in sizes.items()})
        note.write_text(json.dumps({"sha256": digest}))
    return Lessons(**{name: _open(folder, name, size, "r") for name, size in sizes.items()}, starts=starts)


def _open(folder: Path, name: str, size: tuple[int, ...], mode: str) -> np.memmap:
    return np.memmap(folder / f"{name}.f16", np.float16, mode, shape=size)  # type: ignore[call-overload]


def _ask(texts: list[str], starts: np.ndarray, target: dict[str, np.memmap]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(minilm_folder())
    net = AutoModel.from_pretrained(minilm_folder()).eval()
    order = np.argsort([len(text) for text in texts], kind="stable")
    began = time.monotonic()
    for done in range(0, len(order), BATCH):
        rows = order[done : done + BATCH]
        batch = tokenizer(
            [texts[row] for row in rows], padding=True, truncation=True, max_length=LENGTH, return_tensors="pt",
            return_offsets_mapping=True,
        )  # fmt: skip
        offsets = batch.pop("offset_mapping").tolist()
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
            states = net(**batch, output_hidden_states=True).hidden_states
        mask = batch["attention_mask"].unsqueeze(-1).float()
        means = torch.stack([(state.float() * mask).sum(dim=1) / mask.sum(dim=1) for state in states], dim=1)
        target["sentences"][rows] = means.numpy()
        counts = np.diff(starts)[rows]
        words = torch.tensor([words_of_tokens(texts[row], offset) for row, offset in zip(rows, offsets, strict=True)])
        hot = averaging(words, int(counts.max()))
        found = torch.stack([hot @ states[layer].float() for layer in WORD_LAYERS], dim=2).numpy()
        for place, row in enumerate(rows):
            target["words"][starts[row] : starts[row + 1]] = found[place, : counts[place]]
        if done // BATCH % 50 == 0:
            print(f"teacher: {done} of {len(order)} texts, {time.monotonic() - began:.0f} s", flush=True)
