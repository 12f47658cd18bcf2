"""A site's own task: turns its files into training examples and scores its test texts. Stays at the site."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedstill.common.config import SiteTask
from fedstill.common.data.answer_scores import answer_scores, question_scores, summary_scores
from fedstill.common.data.splits import Text
from fedstill.common.data.tasks import TASKS, Row, TaskError, read_rows, site_rows
from fedstill.common.models.bert2bert import IGNORED, MixedModel
from fedstill.common.models.tokens import Encoded

Rows = NDArray[np.int64]
LONGEST_ANSWER = 30  # tokens
TESTED_AT_ONCE = 32


@dataclass(frozen=True)
class Item:
    """One text of a task: the input, the answers that count as right, and where in a passage the first begins.

    A question that its passage does not answer has the one answer "".
    """

    text: Text
    answers: tuple[str, ...]
    start: int = -1


@dataclass(frozen=True)
class Examples:
    """Inputs with the target of each: a number, a pair of positions, or tokens."""

    inputs: Encoded
    name: str
    wanted: list[NDArray[np.int64]]

    def __len__(self) -> int:
        return len(self.inputs)

    def batch(self, rows: Rows) -> dict[str, Tensor]:
        """Return the rows as tensors, with the targets under their name."""
        inputs = self.inputs.batch(rows)
        wanted = [self.wanted[row] for row in rows]
        if self.name == "targets":
            return {**inputs, "targets": padded(wanted, IGNORED)}
        return {**inputs, self.name: torch.from_numpy(np.stack(wanted))}


def read_items(task: SiteTask, seed: int) -> tuple[list[Item], list[Item]]:
    """Read training and test texts from the site's files; without a test file a random tenth is held out."""
    learned, tested = _known_rows(task) if task.name is not None else _file_rows(task)
    train = [_item(task, row, number) for number, row in enumerate(learned, start=1)]
    if tested:
        return train, [_item(task, row, number) for number, row in enumerate(tested, start=1)]
    if len(train) < 2:
        raise TaskError(f"{task.name or task.train}: one row cannot be learned from and tested on; give task.test")
    order = np.random.default_rng(seed).permutation(len(train))
    kept = set(order[: max(1, len(train) // 10)].tolist())
    return [item for n, item in enumerate(train) if n not in kept], [train[n] for n in sorted(kept)]


def _file_rows(task: SiteTask) -> tuple[list[Row], list[Row]]:
    return _rows(task, task.train), [] if task.test is None else _rows(task, task.test)


def _known_rows(task: SiteTask) -> tuple[list[Row], list[Row]]:
    """Return a known data set's rows, or the site's slice; shuffled where rows may be sorted by class."""
    learned, tested = site_rows(str(task.name), task.folder)
    if task.kind == "classification":
        learned = [learned[n] for n in np.random.default_rng(0).permutation(len(learned))]
    if task.share is not None:
        number, slices = task.share
        learned = learned[len(learned) * (number - 1) // slices : len(learned) * number // slices]
    return learned, tested if task.test is None else _rows(task, task.test)


def _rows(task: SiteTask, path: Any) -> list[Row]:
    rows = list(read_rows(path))
    if not rows:
        raise TaskError(f"{path}: there are no rows in it")
    for key, column in [*(("text", name) for name in task.text), ("target", task.target)]:
        if column not in rows[0]:
            raise TaskError(
                f"{path}: there is no column {column!r} (task.{key} of {task.kind}); columns: {', '.join(rows[0])}"
            )
    return rows


def _item(task: SiteTask, row: Mapping[str, Any], number: int) -> Item:
    parts = [str(row[name]) for name in task.text]
    target = row[task.target]
    answers = tuple(str(answer) for answer in target) if isinstance(target, list) else (str(target),)
    start = -1
    if task.kind == "question-answering" and not any(answer.strip() for answer in answers):
        answers = ("",)
    elif task.kind == "question-answering":
        start = int(row.get("answer_start", -1))
        if parts[1][start : start + len(answers[0])] != answers[0] or start < 0:
            start = parts[1].find(answers[0])
        if start < 0:
            raise TaskError(f"row {number}: the answer {answers[0]!r} is not a part of its {task.text[1]}; correct it")
    return Item(parts[0] if len(parts) == 1 else (parts[0], parts[1]), answers, start)


class Work:
    """A task with its texts, encoded for a model's tokenizer."""

    def __init__(self, task: SiteTask, seed: int) -> None:
        self.task = task
        self.train, self.test = read_items(task, seed)
        self.labels: list[str] = []
        if task.kind == "classification":
            known = [] if task.name is None else list(TASKS[task.name].labels)
            self.labels = task.labels or known or sorted({item.answers[0] for item in self.train})
            unknown = sorted({item.answers[0] for item in [*self.train, *self.test]} - set(self.labels))
            if unknown or len(self.labels) < 2:
                raise TaskError(
                    f"{task.name or task.train}: labels {self.labels}, and {unknown or 'no second one'} beside them; "
                    "list every label in task.labels"
                )

    @property
    def open_ended(self) -> bool:
        """Whether some questions have no answer, so that saying nothing is learned and may be right (SQuAD 2.0)."""
        return any(not item.answers[0] for item in self.train)

    @property
    def outputs(self) -> int:
        """The width of the private classifier: one per class, or the two ends of an answer."""
        return len(self.labels) or (2 if self.task.kind == "question-answering" else 0)

    def examples(self, model: MixedModel) -> Examples:
        """Return the training texts with their targets."""
        kind = self.task.kind
        if kind == "question-answering":
            windows = Windows(model, self.task, self.train)
            return Examples(windows.inputs, "spans", windows.spans())
        inputs = model.encode([item.text for item in self.train])
        if kind == "classification":
            numbers = {label: np.asarray(number) for number, label in enumerate(self.labels)}
            return Examples(inputs, "labels", [numbers[item.answers[0]] for item in self.train])
        return Examples(inputs, "targets", [self._written(model, item.answers[0]) for item in self.train])

    def _written(self, model: MixedModel, text: str) -> NDArray[np.int64]:
        room = self.task.target_length - 1
        ids = model.tokenizer(text, add_special_tokens=False, truncation=True, max_length=room, verbose=False).input_ids
        return np.array([*ids, *model.last], np.int64)

    def scores(self, model: MixedModel) -> dict[str, float]:
        """Return the metrics of this kind of task on the test texts."""
        model.eval()
        with torch.inference_mode():
            if self.task.kind == "question-answering":
                guesses = Windows(model, self.task, self.test).answers(model, self.open_ended)
                return answer_scores(guesses, [item.answers for item in self.test])
            inputs = model.encode([item.text for item in self.test])
            parts = [range(i, min(i + TESTED_AT_ONCE, len(inputs))) for i in range(0, len(inputs), TESTED_AT_ONCE)]
            batches = [_on(model, inputs.batch(part)) for part in parts]
            if self.task.kind == "classification":
                guessed = torch.cat([model.scores(batch).argmax(dim=-1) for batch in batches]).tolist()
                right = [self.labels[guess] == item.answers[0] for guess, item in zip(guessed, self.test, strict=True)]
                return {"accuracy": sum(right) / len(right)}
            written = [text for batch in batches for text in model.write(batch, self.task)]
        references = [item.answers[0] for item in self.test]
        return (summary_scores if self.task.kind == "summarisation" else question_scores)(written, references)


def _on(model: MixedModel, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.to(model.device) for name, tensor in batch.items()}


class Windows:
    """Questions with passages; long passages in overlapping windows."""

    def __init__(self, model: MixedModel, task: SiteTask, items: Sequence[Item]) -> None:
        self.items = items
        questions = [_cut(model.tokenizer, item.text[0], task.query_length) for item in items]
        side, model.tokenizer.truncation_side = model.tokenizer.truncation_side, "right"
        encoded = model.tokenizer(
            questions,
            [item.text[1] for item in items],
            truncation="only_second",
            max_length=model.max_length,
            stride=min(task.stride, max(1, model.max_length - task.query_length - 8)),
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
            verbose=False,
        )
        model.tokenizer.truncation_side = side
        self.item = list(encoded["overflow_to_sample_mapping"])
        self.offsets = encoded["offset_mapping"]
        self.passage = [[part == 1 for part in encoded.sequence_ids(n)] for n in range(len(self.item))]
        names = [name for name in ("input_ids", "token_type_ids") if name in encoded]
        lengths = [len(row) for row in encoded["input_ids"]]
        padding = {"input_ids": model.tokenizer.pad_token_id or 0, "token_type_ids": 0}
        self.inputs = Encoded(
            {name: np.concatenate([np.array(row, np.int32) for row in encoded[name]]) for name in names},
            np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            {name: padding[name] for name in names},
            False,
        )

    def spans(self) -> list[NDArray[np.int64]]:
        """Return first and last token of the answer in each window; both 0 where it lacks it or there is none."""
        return [self._span(number) for number in range(len(self.item))]

    def _span(self, number: int) -> NDArray[np.int64]:
        item = self.items[self.item[number]]
        if not item.answers[0]:
            return np.zeros(2, np.int64)
        begin, end = item.start, item.start + len(item.answers[0])
        inside = [
            place
            for place, (a, b) in enumerate(self.offsets[number])
            if self.passage[number][place] and a < end and b > begin
        ]
        whole = inside and self.offsets[number][inside[0]][0] <= begin and self.offsets[number][inside[-1]][1] >= end
        return np.array([inside[0], inside[-1]] if whole else [0, 0], np.int64)

    def answers(self, model: MixedModel, open_ended: bool = False) -> list[str]:
        """Return the likeliest span of each item over all its windows; nothing where all windows rather say that.

        A window says nothing by its first token, as it learned to. Devlin et al. 2019, section 4.3: the least of an
        item's windows counts, against the likeliest span.
        """
        best = [(-np.inf, "")] * len(self.items)
        nothing = np.full(len(self.items), np.inf)
        for first in range(0, len(self.item), TESTED_AT_ONCE):
            rows = range(first, min(first + TESTED_AT_ONCE, len(self.item)))
            both = model.span_scores(_on(model, self.inputs.batch(rows))).cpu().numpy().astype(np.float64)
            for row, scores in zip(rows, both, strict=True):
                number = self.item[row]
                span = self._likeliest(row, scores)
                nothing[number] = min(nothing[number], scores[0].sum())
                if span[0] > best[number][0]:
                    best[number] = span
        return [
            "" if open_ended and least > score else text for (score, text), least in zip(best, nothing, strict=True)
        ]

    def _likeliest(self, row: int, scores: NDArray[np.float64]) -> tuple[float, str]:
        places = np.flatnonzero(self.passage[row])
        if not len(places):
            return -np.inf, ""
        begins, ends = scores[places, 0], scores[places, 1]
        sums = begins[:, None] + ends[None, :]
        distance = np.arange(len(places))[None, :] - np.arange(len(places))[:, None]
        sums[(distance < 0) | (distance >= LONGEST_ANSWER)] = -np.inf
        i, j = np.unravel_index(int(sums.argmax()), sums.shape)
        begin, end = self.offsets[row][places[i]][0], self.offsets[row][places[j]][1]
        return float(sums[i, j]), self.items[self.item[row]].text[1][begin:end]


def _cut(tokenizer: Any, text: str, length: int) -> str:
    """Cut a question to so many tokens."""
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)["offset_mapping"]
    return text if len(offsets) <= length else text[: offsets[length - 1][1]]


def padded(rows: Sequence[NDArray[np.int64]], fill: int) -> Tensor:
    """Pad rows of different lengths into one matrix."""
    matrix = np.full((len(rows), max(map(len, rows))), fill, np.int64)
    for place, row in enumerate(rows):
        matrix[place, : len(row)] = row
    return torch.from_numpy(matrix)
