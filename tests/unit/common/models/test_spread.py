"""One model on several devices: who takes which layers, and what is refused."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedstill.common.config import LearnerConfig, TrainConfig
from fedstill.common.data.tasks import TASKS
from fedstill.common.models.loading import load_model
from fedstill.common.models.spread import shares
from fedstill.common.models.text_model import ModelError, pick_devices


def fullest(around: int, layers: list[int], counts: tuple[int, ...]) -> int:
    """The largest load that these counts give a device."""
    loads, at = [around], 0
    for number, count in enumerate(counts):
        part = sum(layers[at : at + count])
        loads = [around + part] if number == 0 else [*loads, part]
        at += count
    return max(loads)


@given(st.integers(0, 30), st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(2, 4))
def test_the_fullest_device_is_as_empty_as_any_other_split_would_leave_it(
    around: int, layers: list[int], count: int
) -> None:
    found = shares(around, layers, count)
    splits = [
        counts
        for counts in product(range(len(layers) + 1), repeat=count)
        if sum(counts) == len(layers) and all(counts[1:])
    ]
    if found is None:
        assert splits == []
        return
    assert tuple(found) in splits
    assert fullest(around, layers, tuple(found)) == min(fullest(around, layers, counts) for counts in splits)


def test_large_embeddings_leave_the_layers_to_the_others() -> None:
    assert shares(100, [10, 10, 10, 10], 3) == [0, 2, 2]
    assert shares(20, [20, 20, 20], 2) == [1, 2]
    assert shares(0, [5], 3) is None


@pytest.mark.parametrize(
    ("settings", "cure"),
    [
        ({"device": ["cuda:0", "cuda:0"]}, "names one device twice: name each once"),
        ({"device": ["cuda:0", "cuda:1"], "compile": True}, "name one as device, or take compile out"),
        ({"device": "all", "quantize": "4bit", "lora": {}}, "name one as device, or take quantize out"),
        ({"device": []}, "at least 1 item"),
    ],
)
def test_what_does_not_go_together_is_said_with_its_cure(settings: dict[str, Any], cure: str) -> None:
    with pytest.raises(ValueError, match=cure):
        LearnerConfig(**settings)


def test_devices_that_are_not_there_are_named() -> None:
    assert pick_devices("cpu") == pick_devices(["cpu"]) == [torch.device("cpu")]
    with pytest.raises(ModelError, match="names one device twice"):
        pick_devices(["cpu", "cpu"])
    with pytest.raises(ModelError, match="'gpu' is not known"):
        pick_devices(["cpu", "gpu"])
    if not torch.cuda.is_available():
        with pytest.raises(ModelError, match="'all' finds no CUDA device"):
            pick_devices("all")
        with pytest.raises(ModelError, match="'cuda:0' is not there"):
            pick_devices(["cuda:0", "cuda:1"])


def test_more_devices_than_layers_are_refused() -> None:
    settings = LearnerConfig(device=["cpu", "meta", "meta:1", "meta:2", "meta:3", "meta:4"]).model_settings(
        TrainConfig()
    )
    with pytest.raises(ModelError, match=r"device: a bert model of \d layers cannot be spread over 6 devices; name at"):
        load_model(settings, TASKS["film-reviews"], 0)


def test_a_list_of_one_device_is_that_device() -> None:
    settings = LearnerConfig(device=["cpu"]).model_settings(TrainConfig())
    assert load_model(settings, TASKS["film-reviews"], 0).devices == [torch.device("cpu")]
