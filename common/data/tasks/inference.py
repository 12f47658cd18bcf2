"""Inference tasks beside GLUE's (SNLI, ANLI) and paraphrases from scrambled words (PAWS)."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path

from fedstill.common.data.tasks.glue import NO_LABEL
from fedstill.common.data.tasks.library import Files, Hub, Known
from fedstill.common.data.tasks.rows import Row, read_rows
from fedstill.common.data.tasks.task import INFERENCE_TRIANGLE, Task

COLUMNS = {
    "premise": ("premise", "sentence1", "context"),
    "hypothesis": ("hypothesis", "sentence2"),
    "label": ("gold_label", "label"),
    "round": ("round", "tag", "folder"),
}
LETTERS = {"e": "entailment", "n": "neutral", "c": "contradiction"}


def _task(name: str, title: str, domain: str | None = None) -> Task:
    labels, points = tuple(INFERENCE_TRIANGLE), tuple(INFERENCE_TRIANGLE.values())
    texts = ("premise", "hypothesis")
    return Task(name, labels, title=title, text_columns=texts, domain_column=domain, coordinates=points)


def _paws(path: Path) -> Iterable[Row]:
    """Read PAWS: PAWS-QQP's own script writes texts as Python bytes literals."""
    for row in read_rows(path):
        yield {name: _plain(value) for name, value in row.items()}


def _plain(cell: str | None) -> str | None:
    if cell is not None and cell[:2] in ("b'", 'b"'):
        return str(ast.literal_eval(cell).decode("utf-8"))
    return cell


INFERENCE = [
    Known(
        _task("snli", "SNLI: captions of pictures"),
        Files(
            ("snli_1.0", "snli", "nli"),
            ("snli_1.0_train.jsonl*", "snli_1.0_train_subset.jsonl*", "snli_train.jsonl", "train.jsonl"),
            ("snli_1.0_test.jsonl*", "snli_test.jsonl", "test.jsonl"),
        ),
        "nlp.stanford.edu/projects/snli", Hub("stanfordnlp/snli", test=("test",)), names=COLUMNS, skip=NO_LABEL,
    ),
    Known(
        _task("anli", "ANLI: written to mislead models, rounds 1 to 3", "round"),
        Files(
            ("anli_v1.0", "anli", "nli"), ("R*/train.jsonl", "anli_train.jsonl"), ("R*/test.jsonl", "anli_test.jsonl"),
        ),
        "github.com/facebookresearch/anli",
        Hub(
            "facebook/anli", train=("train_r1", "train_r2", "train_r3"), test=("test_r1", "test_r2", "test_r3"),
        ),
        names=COLUMNS, words=LETTERS, skip=NO_LABEL,
    ),
    Known(
        Task(
            "paws", ("different", "same"), title="PAWS: paraphrases from scrambled words",
            text_columns=("sentence1", "sentence2"),
        ),
        Files(
            ("paws", "paws_wiki", "paws_qqp", "final"), ("train.tsv", "train.csv"),
            ("test.tsv", "dev_and_test.tsv", "test.csv"),
        ),
        "github.com/google-research-datasets/paws",
        Hub("google-research-datasets/paws", "labeled_final", test=("test",)), read=_paws,
    ),
]  # fmt: skip
