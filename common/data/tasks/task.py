"""What a task is: its labels and their coordinates, its columns, its metric."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

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
    """Return coordinates 1 to C for ordered labels, such as stars."""
    return tuple((float(place),) for place in range(1, classes + 1))


def points_by_name(labels: Sequence[str]) -> Coordinates:
    """Return coordinates of emotions or of the three inference relations, if all labels have these names; else none."""
    for known in (VALENCE_AROUSAL, INFERENCE_TRIANGLE):
        if all(label in known for label in labels):
            return tuple(known[label] for label in labels)
    return ()


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
    prompt: str = ""  # what a decoder-only model reads: {text}, and {second} of a pair; the label word follows
    choices: tuple[tuple[str, tuple[int, ...]], ...] = ()  # the possible classes of each domain, if they differ
    coordinates: Coordinates = ()  # coordinates of the labels; empty: all are equally far apart

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
        fields = ("{text}", "{second}")[: len(self.text_columns)]
        if not self.prompt:
            object.__setattr__(self, "prompt", "\n".join(fields) + "\nAnswer:")
        for field in fields:
            if field not in self.prompt:
                raise TaskError(f"task {self.name}: task.prompt = {self.prompt!r} has no {field}; put it in")
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
