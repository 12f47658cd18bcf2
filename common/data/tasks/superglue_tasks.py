"""Wang et al., "SuperGLUE", NeurIPS 2019: each of the eight as a classification of its own; all in one: `superglue`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from fedstill.common.data.tasks.library import Files, Hub, Known, Shape
from fedstill.common.data.tasks.rows import Row
from fedstill.common.data.tasks.task import INFERENCE_TRIANGLE, Task, TaskError

if TYPE_CHECKING:
    from fedstill.common.config import TaskConfig

Examples = Iterator[tuple[str, str, Any]]  # two texts and the file's label
YES = {"true": "yes", "1": "yes", "false": "no", "0": "no"}
TWO_WAY = {"0": "entailment", "1": "not_entailment"}
THREE_WAY = {"0": "entailment", "1": "contradiction", "2": "neutral"}  # as the hub numbers them


def _boolq(row: Row) -> Examples:
    yield row["question"], row["passage"], row["label"]


def _pair(row: Row) -> Examples:
    yield row["premise"], row["hypothesis"], row["label"]


def _copa(row: Row) -> Examples:
    question = {"cause": "What was the cause?", "effect": "What happened as a result?"}[row["question"]]
    yield f"{row['premise']} {question}", f"first: {row['choice1']} second: {row['choice2']}", row["label"]


def _multirc(row: Row) -> Examples:
    """One passage with its questions (the files), or one answer (the hub)."""
    if "passage" not in row:
        yield row["paragraph"], f"{row['question']} {row['answer']}", row["label"]
        return
    for question in row["passage"]["questions"]:
        for answer in question["answers"]:
            yield row["passage"]["text"], f"{question['question']} {answer['text']}", answer["label"]


def _record(row: Row) -> Examples:
    """Yield the query with each entity in place of @placeholder."""
    if "qas" in row:
        text = row["passage"]["text"]
        entities = dict.fromkeys(text[place["start"] : place["end"] + 1] for place in row["passage"]["entities"])
        queries = [(question["query"], {answer["text"] for answer in question["answers"]}) for question in row["qas"]]
    else:
        text, entities, queries = row["passage"], dict.fromkeys(row["entities"]), [(row["query"], set(row["answers"]))]
    for query, right in queries:
        for entity in entities:
            yield text, query.replace("@placeholder", entity), entity in right


def _wic(row: Row) -> Examples:
    yield f"{row['word']}: {row['sentence1']}", row["sentence2"], row["label"]


def _wsc(row: Row) -> Examples:
    """The pronoun between asterisks, and the noun that it may stand for."""
    target = row.get("target", row)
    words, start = str(row["text"]).split(), int(target["span2_index"])
    end = start + len(str(target["span2_text"]).split())
    marked = " ".join([*words[:start], "*", *words[start:end], "*", *words[end:]])
    yield marked, str(target["span1_text"]), row["label"]


def _shaped(name: str, examples: Callable[[Row], Examples], words: Mapping[str, str]) -> Shape:
    def shape(rows: Iterable[Row], config: TaskConfig) -> Iterator[Row]:
        for row in rows:
            try:
                for first, second, label in examples(row):
                    word = str(label).lower()
                    yield {"first": first, "second": second, "label": words.get(word, word)}
            except (KeyError, TypeError) as error:
                raise TaskError(
                    f"{row.get('folder', name)}/{row.get('file', '')}: a row is not as SuperGLUE has it ({error} is "
                    "missing or unknown); the usual jsonl files are needed, with labels"
                ) from None

    return shape


def _known(
    folder: str,
    examples: Callable[[Row], Examples],
    title: str,
    labels: tuple[str, ...] = ("no", "yes"),
    words: Mapping[str, str] = YES,
    metric: str = "accuracy",
    name: str = "",
) -> Known:
    name = name or folder.lower()
    points = tuple(INFERENCE_TRIANGLE[label] for label in labels) if set(labels) == set(INFERENCE_TRIANGLE) else ()
    return Known(
        Task(name, labels, metric, f"{folder}: {title}", ("first", "second"), coordinates=points),
        Files((f"superglue/{folder}", folder), ("train.jsonl",), ("val.jsonl", "dev.jsonl")),
        "super.gluebenchmark.com, Tasks",
        Hub("aps/super_glue", folder.lower(), revision="refs/convert/parquet"),
        shape=_shaped(name, examples, words),
    )


SUPERGLUE = [
    _known("BoolQ", _boolq, "a yes or no question on a passage"),
    _known("CB", _pair, "is the clause meant?", tuple(INFERENCE_TRIANGLE), THREE_WAY, "f1_macro"),
    _known("COPA", _copa, "the likelier cause or effect", ("first", "second"), {"0": "first", "1": "second"}),
    _known("MultiRC", _multirc, "is the answer right? one text an answer", metric="f1"),
    _known("ReCoRD", _record, "is it this entity? one text an entity", metric="f1"),
    _known(
        "RTE", _pair, "does the text entail the sentence?", ("entailment", "not_entailment"), TWO_WAY,
        name="superglue-rte",
    ),
    _known("WiC", _wic, "does the word mean the same?"),
    _known("WSC", _wsc, "does the pronoun stand for the noun?"),
]  # fmt: skip
