"""How answers are scored."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from fedstill.common.data.tasks.task import METRICS, Coordinates, Task, TaskError
from fedstill.common.maths.ensemble import softmax


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


def domain_scores(task: Task, labels: ArrayLike, outputs: ArrayLike, domains: Sequence[str] | None) -> dict[str, float]:
    """The task's metric, and the semantic distance, of each domain by itself; nothing where all texts are of one."""
    names = np.array(domains or ())
    if task.choices or len(set(names)) < 2:
        return {}
    found, true, said = {}, np.asarray(labels), np.asarray(outputs)
    for domain in sorted(set(names)):
        for name, value in scores(task.metric, true[names == domain], said[names == domain], task.coordinates).items():
            if name in (task.metric, "semantic_distance"):
                found[f"{name}_{domain}"] = value
    return found


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
