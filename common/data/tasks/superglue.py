"""SuperGLUE as text-to-text (FedDRS, appendix A): one line a question, one word an answer, one model for all tasks."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedstill.common.data.splits import Pools, TextSet
from fedstill.common.data.tasks import Row, Task, TaskError, read_rows
from fedstill.common.data.tasks.library import ROOT

if TYPE_CHECKING:
    from fedstill.common.config import TaskConfig

Example = tuple[dict[str, str], Any]  # fields in the order of the line, and the file's label


@dataclass(frozen=True)
class Part:
    """One of the eight: its folder, its answers by the file's label, how rows become examples, how many are used."""

    folder: str
    words: Mapping[str, str]
    examples: Callable[[Row], Iterable[Example]]
    used: int | None = None  # of the training texts

    @property
    def name(self) -> str:
        """In lower case, as the lines begin."""
        return self.folder.lower()


def plain(text: str) -> str:
    """Remove punctuation except @placeholder and underscores."""
    return " ".join(re.sub(r"[^\w\s@]", "", text).split())


def line(task: str, fields: Mapping[str, str]) -> str:
    """`task first: text. second: text`."""
    return f"{task} " + ". ".join(f"{name}: {plain(text)}" for name, text in fields.items())


def _of(*names: str) -> Callable[[Row], Iterable[Example]]:
    return lambda row: [({name: str(row[name]) for name in names}, row["label"])]


def _multirc(row: Row) -> Iterable[Example]:
    for question in row["passage"]["questions"]:
        for answer in question["answers"]:
            fields = {"question": question["question"], "answer": answer["text"], "paragraph": row["passage"]["text"]}
            yield fields, answer["label"]


def _record(row: Row) -> Iterable[Example]:
    text = row["passage"]["text"]
    entities = dict.fromkeys(text[place["start"] : place["end"] + 1] for place in row["passage"]["entities"])
    for question in row["qas"]:
        right = {answer["text"] for answer in question["answers"]}
        for entity in entities:
            yield {"answer": entity, "query": question["query"], "passage": text}, entity in right


def _wsc(row: Row) -> Iterable[Example]:
    words, target = str(row["text"]).split(), row["target"]
    start = int(target["span2_index"])
    end = start + len(str(target["span2_text"]).split())
    parts = [" ".join(words[:start]), " ".join(words[start:end]), " ".join(words[end:])]
    yield {"": " * ".join(map(plain, parts)).strip()}, row["label"]


_PLAIN = {"entailment": "Entailment", "contradiction": "Contradiction", "neutral": "Neutral"}
_RTE = {"entailment": "Entailment", "not_entailment": "Not_entailment"}
_CHOICES = {"0": "Choice_one", "1": "Choice_two"}


def _two(yes: str, no: str) -> dict[str, str]:
    return {"true": yes, "1": yes, "false": no, "0": no}


PARTS = {
    part.name: part
    for part in (
        Part("BoolQ", _two("Yes", "No"), _of("question", "passage"), 9427),
        Part("CB", _PLAIN, _of("hypothesis", "premise")),
        Part("COPA", _CHOICES, _of("choice1", "choice2", "premise", "question")),
        Part("MultiRC", _two("True", "False"), _multirc, 963),
        Part("ReCoRD", _two("Correct", "Wrong"), _record, 9000),
        Part("RTE", _RTE, _of("hypothesis", "premise"), 2500),
        Part("WiC", _two("Match", "Mismatch"), _of("word", "sentence1", "sentence2"), 6000),
        Part("WSC", _two("Same", "Difference"), _wsc),
    )
}


def load(config: TaskConfig) -> tuple[Task, Pools]:
    """Load the configured parts, from CB/train.jsonl, CB/val.jsonl and so on; each is a domain."""
    folder = config.folder or _usual_folder()
    names = config.parts or list(PARTS)
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        raise TaskError(f"task.parts names {', '.join(unknown)}; known: {', '.join(PARTS)}")
    parts = [PARTS[name] for name in PARTS if name in names]
    _check_there(folder, parts)
    labels = tuple(dict.fromkeys(word for part in parts for word in part.words.values()))
    numbers = {word: number for number, word in enumerate(labels)}
    all_labels = tuple(range(len(labels)))
    choices = tuple(
        (part.name, tuple(sorted({numbers[word] for word in part.words.values()})) if config.own_words else all_labels)
        for part in parts
    )
    task = Task(
        name="superglue",
        labels=labels,
        metric=config.metric or "accuracy",
        title=f"SuperGLUE as text-to-text: {', '.join(part.folder for part in parts)}",
        label_words=tuple(config.label_words or ()),
        prompt=config.prompt or "",
        choices=choices,
    )
    train = [_texts(folder, part, "train", numbers) for part in parts]
    return task, Pools(_joined(train), _joined([_texts(folder, part, "val", numbers) for part in parts]))


def _usual_folder() -> Path:
    root = os.environ.get(ROOT)
    if root is None:
        raise TaskError(
            f"task superglue needs task.folder, with CB/train.jsonl, CB/val.jsonl and so on in it (from "
            f"super.gluebenchmark.com), or {ROOT}, the folder that holds it as superglue/"
        )
    return Path(root) / "superglue"


def _check_there(folder: Path, parts: list[Part]) -> None:
    absent = {
        part.name: f"{part.folder}/{split}.jsonl"
        for part in parts
        for split in ("val", "train")
        if not (folder / part.folder / f"{split}.jsonl").is_file()
    }
    if absent:
        left = [part.name for part in parts if part.name not in absent]
        raise TaskError(
            f"task.folder {folder}: {', '.join(absent.values())} not there; add the files, or leave these tasks out: "
            f"task.parts = {left}"
        )


def _texts(folder: Path, part: Part, split: str, numbers: Mapping[str, int]) -> TextSet:
    texts, labels, path = [], [], folder / part.folder / f"{split}.jsonl"
    for row in read_rows(path):
        try:
            for fields, label in part.examples(row):
                texts.append(line(part.name, fields) if "" not in fields else f"{part.name}: {fields['']}")
                labels.append(numbers[part.words[str(label).lower()]])
        except (KeyError, TypeError) as error:
            raise TaskError(
                f"{path}: a row is not as SuperGLUE has it ({error} is missing or unknown); "
                "the usual jsonl files are needed, with labels"
            ) from None
    count = len(texts)
    if split == "train" and part.used is not None and count > part.used:  # spread over the file
        kept = np.linspace(0, count - 1, part.used).round().astype(int)
        texts, labels = [texts[i] for i in kept], [labels[i] for i in kept]
    return TextSet(tuple(texts), np.array(labels, np.int64), (part.name,) * len(texts))


def _joined(sets: list[TextSet]) -> TextSet:
    return TextSet(
        tuple(text for part in sets for text in part.texts),
        np.concatenate([np.asarray(part.labels) for part in sets]),
        tuple(domain for part in sets for domain in part.domains or ()),
    )
