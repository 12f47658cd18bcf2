"""Data sets for a site's own task: question answering, summaries, question generation, classification."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedstill.common.data.tasks.hub import hub_parts
from fedstill.common.data.tasks.library import ROOT, Files, Hub
from fedstill.common.data.tasks.rows import Row, open_text, read_rows
from fedstill.common.data.tasks.task import TaskError


@dataclass(frozen=True)
class Passages:
    """A data set by name: its kind of task, its files, and how rows become the columns of that kind."""

    name: str
    kind: str
    title: str
    files: Files
    home: str
    read: Callable[[Path], Iterable[Row]]
    hub: Hub | None = None
    from_hub: Callable[[Row], Row] = dict

    def source(self, folder: Path | None = None) -> str | None:
        """Return what would be read, or None if nothing is available without the hub."""
        parts = self.files.find(folder)
        return ", ".join(f"{part}: {paths[0]}" for part, paths in parts.items()) or None

    def load(self, folder: Path | None) -> tuple[list[Row], list[Row]]:
        """Return training and test rows; the latter are empty if the source has no test part."""
        parts = self.files.find(folder)
        if parts:
            try:
                rows = {part: [row for path in paths for row in self.read(path)] for part, paths in parts.items()}
            except (KeyError, TypeError, IndexError, csv.Error, json.JSONDecodeError) as error:
                listed = ", ".join(str(path) for paths in parts.values() for path in paths)
                raise TaskError(f"{listed}: not as {self.name} is usually written ({error!r}); {self.home}") from error
            return rows["train"], rows.get("test", [])
        if folder is not None or self.hub is None:
            raise TaskError(self._absent(folder))
        try:
            hub_rows = hub_parts(self.hub.name, self.hub.config, self.hub.revision)
        except TaskError as error:
            raise TaskError(f"{self._absent(None)}\n{error}") from error
        both = [
            [self.from_hub(row) for name in names for row in hub_rows[name]]
            for names in (self.hub.train, self.hub.test)
        ]
        return both[0], both[1]

    def _absent(self, folder: Path | None) -> str:
        looked = str(folder) if folder is not None else os.environ.get(ROOT) or f"${ROOT}, which is not set"
        wanted = " or ".join((*self.files.train, *self.files.test))
        hub = f", or on the hub: {self.hub.name}" if self.hub else ""
        return (
            f"task {self.name}: its files are not there. Looked in {looked} (and in {', '.join(self.files.folders)} "
            f"under it) for {wanted}. Get them from {self.home}{hub}; then set folder in the site's [task], or {ROOT} "
            "to the folder that holds all data sets"
        )


def squad_rows(path: Path) -> Iterator[Row]:
    """Read SQuAD's json: articles, paragraphs, questions with their answers; version 2.0 has questions without any."""
    with open_text(path) as file:
        articles = json.load(file)["data"]
    for article in articles:
        for part in article["paragraphs"]:
            for question in part["qas"]:
                yield _answered(question["question"], part["context"], question["answers"])


def _answered(question: str, context: str, answers: list[Any]) -> Row:
    texts = list(dict.fromkeys(answer["text"] for answer in answers))
    start = answers[0]["answer_start"] if answers else -1
    return {"question": question.strip(), "context": context, "answer": texts, "answer_start": start}


def _squad_on_hub(row: Row) -> Row:
    columns = row["answers"]
    answers = [
        {"text": text, "answer_start": start}
        for text, start in zip(columns["text"], columns["answer_start"], strict=True)
    ]
    return _answered(row["question"], row["context"], answers)


def newsqa_rows(path: Path) -> Iterator[Row]:
    """Read NewsQA's combined json (stories with questions and a consensus), or MRQA's jsonl."""
    if ".jsonl" in path.name:
        for row in read_rows(path):
            for question in row.get("qas", []):
                spans = [(a["text"], a["char_spans"][0][0]) for a in question["detected_answers"]]
                yield _answered(
                    question["question"], row["context"], [{"text": text, "answer_start": at} for text, at in spans]
                )
        return
    with open_text(path) as file:
        stories = json.load(file)["data"]
    for story in stories:
        for question in story["questions"]:
            place = question.get("consensus", {})
            if "s" in place and story.get("type", "train") == _part(path):
                text = story["text"][place["s"] : place["e"]]
                at = place["s"] + len(text) - len(text.lstrip())
                yield _answered(question["q"], story["text"], [{"text": text.strip(), "answer_start": at}])


def _part(path: Path) -> str:
    return next((part for part in ("test", "dev") if part in path.stem), "train")


def news_rows(path: Path) -> Iterator[Row]:
    """Read CNN/DailyMail's table: article and highlights."""
    for row in read_rows(path):
        yield _summary(row)


def _summary(row: Row) -> Row:
    return {"text": row["article"], "summary": row["highlights"]}


def msqg_rows(path: Path) -> Iterator[Row]:
    """Read GLGE's pairs of files: `answer [SEP] passage` in .src, the question in .tgt."""
    target_path = path.with_suffix(".tgt")
    with open_text(path) as file, open_text(target_path) as wanted:
        read, questions = file.read().splitlines(), wanted.read().splitlines()
    if len(read) != len(questions):
        raise TaskError(f"{path} has {len(read)} lines and {target_path.name} {len(questions)}; get both again")
    for source, question in zip(read, questions, strict=True):
        answer, _, context = source.partition("[SEP]")
        yield {"answer": answer.strip(), "context": context.strip(), "question": question.strip()}


PASSAGES = [
    Passages(
        "squad", "question-answering", "SQuAD 1.1",
        Files(("squad", "SQuAD"), ("train-v1.1.json*",), ("dev-v1.1.json*",)),
        "rajpurkar.github.io/SQuAD-explorer", squad_rows, Hub("rajpurkar/squad"), _squad_on_hub,
    ),
    Passages(
        "squad2", "question-answering", "SQuAD 2.0: a third of the questions have no answer",
        Files(("squad", "squad2", "SQuAD"), ("train-v2.0.json*",), ("dev-v2.0.json*",)),
        "rajpurkar.github.io/SQuAD-explorer", squad_rows, Hub("rajpurkar/squad_v2"), _squad_on_hub,
    ),
    Passages(
        "newsqa", "question-answering", "NewsQA: questions on CNN's news",
        Files(
            ("newsqa", "NewsQA"), ("train*.json", "NewsQA.jsonl*", "combined-newsqa-data-v1.json"),
            ("test*.json", "NewsQA_dev.jsonl*", "dev*.json"),
        ),
        "github.com/Maluuba/newsqa (the articles are CNN's), or NewsQA.jsonl.gz of the MRQA 2019 shared task",
        newsqa_rows,
    ),
    Passages(
        "cnndm", "summarisation", "CNN/DailyMail",
        Files(
            ("cnn_dailymail", "cnndm"), ("train.csv", "cnn_dailymail-train*.csv*"),
            ("test.csv", "cnn_dailymail-test*.csv*"),
        ),
        "github.com/abisee/cnn-dailymail", news_rows, Hub("abisee/cnn_dailymail", "3.0.0", test=("test",)), _summary,
    ),
    Passages(
        "msqg", "question-generation", "MSQG: questions that a search engine shows",
        Files(("msqg", "msqg_data/org_data", "MSQG"), ("train.src",), ("test.src", "dev.src")),
        "github.com/microsoft/glge (easy, msqg)", msqg_rows,
    ),
]  # fmt: skip
