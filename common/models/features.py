"""Texts as vectors of a pretrained model: the mean of its last hidden states over a text's tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from fedstill.common.data.splits import Text
from fedstill.common.models.text_model import TextModel

BATCH = 64


def text_features(model: TextModel, texts: Sequence[Text]) -> NDArray[np.float32]:
    """Return one row per text, in their order; the model's head is not used."""
    encoded, means = model.encode(texts), []
    order = np.argsort(encoded.lengths(), kind="stable")
    model.eval()
    with torch.inference_mode():
        for start in range(0, len(texts), BATCH):
            means.append(model.vectors(encoded.batch(order[start : start + BATCH])).cpu().numpy())
    rows = np.empty((len(texts), means[0].shape[1] if means else 0), np.float32)
    rows[order] = np.concatenate(means) if means else rows
    return rows
