"""Files as rows with named columns, and rows as texts with labels and domains."""

from __future__ import annotations

import csv
import difflib
import gzip
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from fedstill.common.data.splits import Text, TextSet
from fedstill.common.data.tasks.task import Task, TaskError

Row = Mapping[str, Any]


def read_rows(path: Path, columns: Sequence[str] = (), quoted: bool | None = None) -> Iterator[Row]:
    """Read the rows of a csv, tsv, jsonl or json file, gzipped or not, one mapping each.

    `columns` names the columns of a csv or tsv file without a header. In a tsv file a quotation mark is an ordinary
    character unless it is `quoted`.
    """
    kind = (path.with_suffix("") if path.suffix == ".gz" else path).suffix.lower()
    if kind not in (".csv", ".tsv", ".jsonl", ".json"):
        raise TaskError(f"{path}: only .csv, .tsv, .jsonl and .json files are read; convert it to one of these")
    csv.field_size_limit(2**31 - 1)
    try:
        with open_text(path) as file:
            if kind == ".jsonl":
                yield from _lines_of_json(path, file)
            elif kind == ".json":
                yield from _whole_json(path, file)
            else:
                yield from _cells(file, "\t" if kind == ".tsv" else ",", columns, quoted or kind == ".csv")
    except OSError as error:
        raise TaskError(
            f"{path}: cannot be read ({error.strerror or error}); check the path and its permissions"
        ) from error
    except EOFError as error:
        raise TaskError(f"{path}: is cut short; get the file again") from error
    except UnicodeDecodeError as error:
        raise TaskError(f"{path}: is not UTF-8 text (byte {error.start}); save it as UTF-8") from error
    except csv.Error as error:
        raise TaskError(f"{path}: is not a proper {kind[1:]} file ({error})") from error


def open_text(path: Path) -> TextIO:
    """Open a text file, gzipped or not."""
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8-sig", newline="")
    return path.open(encoding="utf-8-sig", newline="")


def _cells(file: TextIO, mark: str, columns: Sequence[str], quoted: bool) -> Iterator[Row]:
    cells = csv.reader(file, delimiter=mark, quoting=csv.QUOTE_MINIMAL if quoted else csv.QUOTE_NONE)
    names: Sequence[str] = ()
    for row in cells:
        if not row:
            continue
        if not names:
            names = columns or row
            if not columns or columns[-1] in row or columns[0] in row:  # the first line names the columns
                names = row
                continue
        yield dict(zip(names, [*row, *[None] * (len(names) - len(row))], strict=False))


def _lines_of_json(path: Path, file: Iterable[str]) -> Iterator[Row]:
    for number, line in enumerate(file, start=1):
        if line.strip():
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise TaskError(
                    f"{path}, line {number}: is not JSON ({error.msg}); one JSON object a line is needed"
                ) from error
            if not isinstance(row, dict):
                raise TaskError(f"{path}, line {number}: every line must be a JSON object with named columns")
            yield row


def _whole_json(path: Path, file: TextIO) -> Iterator[Row]:
    """Read a list of objects, an object of objects, or (as in review archives) one object per line."""
    text = file.read()
    try:
        contents = json.loads(text)
    except json.JSONDecodeError as error:
        if error.msg != "Extra data":
            raise TaskError(f"{path}: is not JSON ({error.msg}, line {error.lineno}); get the file again") from error
        yield from _lines_of_json(path, text.splitlines())
        return
    if isinstance(contents, dict):
        contents = list(contents.values()) if all(isinstance(row, dict) for row in contents.values()) else [contents]
    for row in contents if isinstance(contents, list) else [None]:
        if not isinstance(row, dict):
            raise TaskError(f"{path}: must be a list of JSON objects with named columns")
        yield row


def check_columns(row: Row, columns: Iterable[tuple[str, str]], path: str) -> None:
    """Refuse rows that lack a column; suggest the closest one."""
    for key, column in columns:
        if column not in row:
            near = difflib.get_close_matches(column, list(row), n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise TaskError(f"{path}: there is no column {column!r} (task.{key}); columns: {', '.join(row)}{hint}")


def labels_in(rows: list[Row], column: str, path: str) -> list[str]:
    """Return the distinct labels of a column, sorted as numbers if all are numbers, else alphabetically."""
    if not rows:
        raise TaskError(f"{path}: there are no rows in it")
    check_columns(rows[0], [("label", column)], path)
    labels = {str(row[column]) for row in rows if row.get(column) not in (None, "")}
    return sorted(labels, key=int) if all(label.lstrip("-").isdigit() for label in labels) else sorted(labels)


def text_set(rows: list[Row], task: Task, path: str, labelled: bool = True) -> tuple[TextSet, int]:
    """Return the rows as a text set, and how many were dropped for a blank text."""
    if not rows:
        raise TaskError(f"{path}: there are no rows in it")
    needed = [("text", column) for column in task.text_columns]
    needed += [("label", task.label_column)] if labelled else []
    # An unlabelled public file need not name its domain.
    with_domain = task.domain_column is not None and (labelled or task.domain_column in rows[0])
    needed += [("domain", str(task.domain_column))] if with_domain else []
    check_columns(rows[0], needed, path)
    numbers = {label: number for number, label in enumerate(task.labels)}
    # Files often hold the class number instead of its name.
    numbers = {str(number): number for number in numbers.values()} | numbers
    texts: list[Text] = []
    labels: list[int] = []
    domains: list[str] = []
    for place, row in enumerate(rows, start=1):
        parts = tuple("" if row.get(column) is None else str(row[column]) for column in task.text_columns)
        if not all(part.strip() for part in parts):
            continue
        texts.append(parts[0] if len(parts) == 1 else (parts[0], parts[1]))
        if labelled:
            label = str(row.get(task.label_column))
            if label not in numbers:
                raise TaskError(
                    f"{path}, row {place}: label {label!r} is none of {', '.join(task.labels)}; "
                    "correct the row or list every label in task.labels"
                )
            labels.append(numbers[label])
        if with_domain:
            domains.append(str(row.get(str(task.domain_column))))
    if not texts:
        raise TaskError(f"{path}: every text in column {', '.join(task.text_columns)} is blank")
    kept = TextSet(
        tuple(texts), np.array(labels, np.int64) if labelled else None, tuple(domains) if with_domain else None
    )
    return kept, len(rows) - len(texts)
