"""The command `fedstill predict`: a finished run's central model on texts of yours."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from fedstill.cli.folders import find_run, summary_of
from fedstill.cli.tables import Json, Runs


def add_to(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command()(predict)


def predict(
    run: Annotated[str, typer.Argument(help="A run's name, or the path of its folder; `latest` is the newest.")],
    texts: Annotated[list[str] | None, typer.Argument(help="Texts, each in quotes.")] = None,
    file: Annotated[
        Path | None, typer.Option(help="A csv, tsv or jsonl file, or one text a line in a txt file; - is the input.")
    ] = None,
    column: Annotated[
        list[str] | None, typer.Option(help="The file's text column, twice for pairs; by default the run's.")
    ] = None,
    as_json: Json = False,
    runs: Runs = Path("runs"),
) -> None:
    """Classify texts with a run's central model; prints label, probability and text, as csv for a file."""
    from fedstill.api import Result

    folder = find_run(runs, run)
    if not (folder / "central" / "config.json").is_file():
        raise ValueError(f"{folder.name} has no central model ({summary_of(folder)['status']}); finish it first")
    result = Result(folder)
    read: list[Any] = list(texts or []) + _from(file, column or list(result.config.task.text))
    if not read:
        raise ValueError('there is nothing to classify: fedstill predict RUN "a text", or --file texts.csv')
    answers = result.model()(read)
    rows = [{**answer, "text": text} for answer, text in zip(answers, read, strict=True)]
    if as_json:
        print(json.dumps(rows, indent=1))
    elif file is not None:
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(["label", "probability", "text"])
        writer.writerows([row["label"], f"{row['probability']:.4f}", _joined(row["text"])] for row in rows)
    else:
        widest = max(len(row["label"]) for row in rows)
        for row in rows:
            print(f"{row['label']:<{widest}}  {row['probability']:.3f}  {_joined(row['text'])}")


def _joined(text: str | tuple[str, str]) -> str:
    return text if isinstance(text, str) else " | ".join(text)


def _from(file: Path | None, columns: list[str]) -> list[str | tuple[str, str]]:
    if file is None:
        return []
    if str(file) == "-" or file.suffix == ".txt":
        lines = sys.stdin if str(file) == "-" else file.read_text(encoding="utf-8").splitlines()
        return [line.strip() for line in lines if line.strip()]
    from fedstill.common.data.tasks.rows import read_rows

    rows = list(read_rows(file))
    known = list(rows[0]) if rows else []
    for column in columns:
        if rows and column not in rows[0]:
            raise ValueError(
                f"{file}: there is no column {column!r}; columns: {', '.join(known)}; name it with --column"
            )
    if len(columns) == 1:
        return [str(row[columns[0]]) for row in rows]
    return [(str(row[columns[0]]), str(row[columns[1]])) for row in rows]
