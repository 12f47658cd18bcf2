"""What the models of a finished run say of test texts, kept for pictures: outputs.safetensors in the run's folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from fedstill.client.node import Node
from fedstill.common.maths.ensemble import softmax
from fedstill.common.models.learner import Learner
from fedstill.common.models.tokens import Encoded
from fedstill.server.central import CentralModel

FILE = "outputs.safetensors"


def save_outputs(folder: Path, central: CentralModel, nodes: Sequence[Node]) -> None:
    """Probabilities of the central model and of every site, and the central model's embeddings, of all test texts."""
    rows = np.arange(len(central.test_texts))
    labels = central.texts.test.labels
    assert labels is not None
    with central.learner.at("outputs"):
        probabilities = softmax(central.learner.predict(central.test_texts, rows))
        arrays = {"central": probabilities, "embeddings": embeddings(central.learner, central.test_texts, rows)}
    arrays["labels"] = labels[rows].astype(np.int64)
    if central.task.coordinates:
        arrays["coordinates"] = np.array(central.task.coordinates, np.float64)
    for node in nodes:
        with node.learner.at("outputs"):
            arrays[f"site/{node.name}"] = softmax(node.learner.predict(node.test, np.arange(len(node.test))))
    draft = folder / f".{FILE}"
    save_file({name: np.ascontiguousarray(value) for name, value in arrays.items()}, draft,
              {"names": json.dumps(central.task.labels)})  # fmt: skip
    draft.replace(folder / FILE)


def embeddings(learner: Learner, texts: Encoded, rows: np.ndarray) -> np.ndarray:
    """The mean of the last layer over each text's tokens, in half precision."""
    learner.model.eval()
    means = []
    with torch.inference_mode():
        for start in range(0, len(rows), 4 * learner.batch_size):
            batch = texts.batch(rows[start : start + 4 * learner.batch_size])
            means.append(learner.model.vectors(batch).cpu().numpy())
    return np.concatenate(means).astype(np.float16)


def load_outputs(folder: Path) -> dict[str, np.ndarray] | None:
    """What `save_outputs` wrote, or None where there is nothing that can be read."""
    try:
        with safe_open(folder / FILE, framework="numpy") as kept:
            arrays = {name: kept.get_tensor(name) for name in kept.keys()}  # noqa: SIM118
            return {**arrays, "names": np.array(json.loads(kept.metadata()["names"]))}
    except (OSError, ValueError, SafetensorError):
        return None
