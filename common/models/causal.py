"""Decoder-only models (GPT-2, Llama, Qwen ...) as classifiers: the label word that would follow the prompt."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedstill.common.data.splits import Text
from fedstill.common.data.tasks import Task
from fedstill.common.models.text_model import ModelError, TextModel, at_least_float32
from fedstill.common.models.tokens import Encoded

FIELDS = re.compile(r"(\{text\}|\{second\})")


class CausalModel(TextModel):
    """Scores class c by the log-probability of its label word after the task's prompt, less the mean over classes."""

    def __init__(self, net: Any, tokenizer: Any, task: Task, max_length: int, device: torch.device, bf16: bool) -> None:
        super().__init__(net, tokenizer, task, max_length, device, bf16)
        self.words = label_words(tokenizer, task)
        self.longest = max_length - max(map(len, self.words)) + 1  # tokens of a prompt, so that every word follows it
        self.room = self.longest - len(self._ids(self._prompt("", "")))
        if self.room < 1:
            raise ModelError(
                f"the prompt {task.prompt!r} and the label words leave no token of max_length = {max_length} for the "
                "text; raise max_length or shorten task.prompt"
            )

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, verbose=False).input_ids
        return ids

    def _prompt(self, text: str, second: str) -> str:
        filled = {"{text}": text, "{second}": second}
        return "".join(filled.get(part, part) for part in FIELDS.split(self.task.prompt))

    def tokenize(self, texts: Sequence[Text]) -> Encoded:
        """Put each text into the prompt; where that is too long, the text is cut and the prompt stays whole."""
        rows = [np.array(self._fitted(*((text, "") if isinstance(text, str) else text)), np.int32) for text in texts]
        starts = np.concatenate([[0], np.cumsum([len(row) for row in rows], dtype=np.int64)]).astype(np.int64)
        tokens = np.concatenate([np.empty(0, np.int32), *rows])
        return Encoded({"input_ids": tokens}, starts, {"input_ids": self.tokenizer.pad_token_id or 0}, left=False)

    def _fitted(self, text: str, second: str) -> list[int]:
        room = self.room
        ids = self._ids(self._prompt(text, second))
        while len(ids) > self.longest and room > 0:  # once, or again where the cut pieces join to other tokens
            share = max(room - self._count(second), room // 2)
            first = self._cut(text, share)
            ids = self._ids(self._prompt(first, self._cut(second, room - self._count(first))))
            room -= 1
        return ids[: self.longest]

    def _count(self, text: str) -> int:
        return len(self.tokenizer(text, add_special_tokens=False, verbose=False).input_ids) if text else 0

    def _cut(self, text: str, room: int) -> str:
        """Return as much of the text's beginning, or end, as `room` tokens hold."""
        if not text or room < 1:
            return ""
        spans = self.tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        ).offset_mapping  # fmt: skip
        if len(spans) <= room:
            return text
        return text[: spans[room - 1][1]] if self.tokenizer.truncation_side == "right" else text[spans[-room][0] :]

    def score(self, inputs: dict[str, Tensor]) -> Tensor:
        """Score every label word after each prompt."""
        lengths = inputs["attention_mask"].sum(dim=1)
        if all(len(word) == 1 for word in self.words):  # one pass tells all: the words compete at one position
            columns = torch.tensor([word[0] for word in self.words], device=self.device)
            scores = self._vocabulary(inputs, lengths[:, None] - 1)[:, 0, columns]
        else:
            scores = self._word_by_word(inputs, lengths)
        return scores - scores.mean(dim=-1, keepdim=True)

    def _vocabulary(self, inputs: dict[str, Tensor], places: Tensor) -> Tensor:
        """Return scores over the vocabulary at these positions of each text; elsewhere they would cost most of all."""
        base = self.base()
        hidden = base.base_model(**inputs, use_cache=False).last_hidden_state
        rows = torch.arange(len(hidden), device=self.device)[:, None]
        return at_least_float32(base.get_output_embeddings()(hidden[rows, places]))

    def _word_by_word(self, inputs: dict[str, Tensor], lengths: Tensor) -> Tensor:
        """Append each word to each prompt and sum the log-probabilities of its tokens."""
        if self.lower is not None:
            raise ModelError(
                f"the label words {list(self.task.label_words)} have several tokens and cannot follow cached states; "
                'choose words of one token, answer = "head", or take freeze out'
            )
        texts, classes = len(lengths), len(self.words)
        longest = max(map(len, self.words))
        targets = torch.full((classes, longest), -1, device=self.device)
        for number, word in enumerate(self.words):
            targets[number, : len(word)] = torch.tensor(word, device=self.device)
        targets = targets.repeat(texts, 1)
        ends = lengths.repeat_interleave(classes)[:, None] + torch.arange(longest, device=self.device)
        tokens = torch.nn.functional.pad(inputs["input_ids"], (0, longest)).repeat_interleave(classes, dim=0)
        mask = torch.nn.functional.pad(inputs["attention_mask"], (0, longest)).repeat_interleave(classes, dim=0)
        tokens.scatter_(1, ends, targets.clamp(min=0))
        mask.scatter_(1, ends, (targets >= 0).to(mask.dtype))
        scores = self._vocabulary({"input_ids": tokens, "attention_mask": mask}, ends - 1).log_softmax(dim=-1)
        chosen = scores.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        return chosen.masked_fill(targets < 0, 0.0).sum(dim=-1).view(texts, classes)

    def check_takes_embeddings(self) -> None:
        """Refuse: a prompt is made of tokens."""
        raise ModelError(
            "this method feeds pseudo texts to the embeddings, and label words are scored after a prompt of tokens; "
            'set answer = "head"'
        )


def label_words(tokenizer: Any, task: Task) -> list[list[int]]:
    """Return the tokens of each label word as they follow the end of the prompt."""
    before = FIELDS.split(task.prompt)[-1]
    prompt = tokenizer(before, add_special_tokens=False).input_ids
    words = []
    for word in task.label_words:
        ids = tokenizer(f"{before} {word}", add_special_tokens=False).input_ids
        follows = ids[: len(prompt)] == prompt
        words.append(ids[len(prompt) :] if follows else tokenizer(f" {word}", add_special_tokens=False).input_ids)
    for one in words:
        for other in words:
            if one is not other and other[: len(one)] == one:
                pair = [task.label_words[words.index(each)] for each in (one, other)]
                raise ModelError(
                    f"label word {pair[0]!r} is the beginning of {pair[1]!r} for this tokenizer, so it would always "
                    "score higher; change task.label_words"
                )
    return words
