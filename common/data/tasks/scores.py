"""Scores of classifications."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from fedstill.common.data.tasks.task import METRICS, Coordinates, Task, TaskError
from fedstill.common.maths.ensemble import softmax


def scores(metric: str, labels_true: ArrayLike, outputs: ArrayLike, coordinates: Coordinates = ()) -> dict[str, float]:
    """Return accuracy, and the task's metric under its own name; `outputs` are logits, one row per text.

    Where labels have coordinates, also the semantic distance.
    """
    from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

    true, outputs = np.asarray(labels_true), np.asarray(outputs)
    if outputs.ndim != 2 or len(true) != len(outputs) or not len(true):
        raise TaskError(f"cannot score outputs of shape {outputs.shape} against {true.shape} labels")
    guess = outputs.argmax(axis=1)
    results = {"accuracy": float(accuracy_score(true, guess))}
    if metric == "mcc":
        results["mcc"] = float(matthews_corrcoef(true, guess))
    elif metric in ("f1", "f1_macro", "f1_weighted"):
        # With two classes, plain F1 is that of class 1, as in GLUE.
        average = metric[3:] or ("binary" if outputs.shape[1] == 2 else "macro")
        results[metric] = float(f1_score(true, guess, average=average, zero_division=0))
    elif metric != "accuracy":
        raise TaskError(f"metric {metric!r} is not known; choose one of {', '.join(METRICS)}")
    if coordinates:
        results["semantic_distance"] = semantic_distance(softmax(outputs), true, coordinates)
    return results


def task_scores(task: Task, labels: ArrayLike, outputs: ArrayLike, domains: Sequence[str] | None) -> dict[str, float]:
    """As `scores`; where domains have their own classes, score among these and add each domain's accuracy and mean."""
    if not task.choices or domains is None:
        return scores(task.metric, labels, outputs, task.coordinates)
    true, possible = np.asarray(labels), np.full(np.shape(outputs), -np.inf)
    outputs, names = np.asarray(outputs, np.float64), np.array(domains)
    for domain, classes in task.choices:
        cells = np.ix_(names == domain, classes)
        possible[cells] = outputs[cells]
    overall = scores(task.metric, true, possible)
    right = possible.argmax(axis=1) == true
    each = {domain: float(right[names == domain].mean()) for domain, _ in task.choices if (names == domain).any()}
    mean = float(np.mean(list(each.values())))
    return {**overall, "mean_over_tasks": mean, **{f"accuracy_{domain}": value for domain, value in each.items()}}


def domain_scores(task: Task, labels: ArrayLike, outputs: ArrayLike, domains: Sequence[str] | None) -> dict[str, float]:
    """Return the task's metric and the semantic distance for each domain; empty where all texts are of one."""
    names = np.array(domains or ())
    if task.choices or len(set(names)) < 2:
        return {}
    results, true, logits = {}, np.asarray(labels), np.asarray(outputs)
    for domain in sorted(set(names)):
        for name, value in scores(
            task.metric, true[names == domain], logits[names == domain], task.coordinates
        ).items():
            if name in (task.metric, "semantic_distance"):
                results[f"{name}_{domain}"] = value
    return results


def semantic_distance(probabilities: ArrayLike, labels: ArrayLike, coordinates: Coordinates) -> float:
    """Return the distance of the expected label from the true one, averaged over true labels; lower is better.

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
