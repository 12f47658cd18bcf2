"""Batches on their way to a device, without a GPU: which copies torch is asked for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedstill.common.config import ModelConfig
from fedstill.common.data.tasks import Task
from fedstill.common.models.loading import load_model
from fedstill.common.models.tokens import onto

CUDA = torch.device("cuda")


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Every pinning and every copy to CUDA, which stays where it is."""
    seen: list[tuple[Any, ...]] = []
    move = Tensor.to

    def pin(self: Tensor) -> Tensor:
        seen.append(("pin", self.dtype))
        pinned = self.clone()
        pinned.is_pinned_here = True  # type: ignore[attr-defined]
        return pinned

    def to(self: Tensor, *arguments: Any, **named: Any) -> Tensor:
        if arguments[:1] != (CUDA,):
            return move(self, *arguments, **named)
        seen.append(("copy", hasattr(self, "is_pinned_here"), named))
        return self

    monkeypatch.setattr(Tensor, "pin_memory", pin)
    monkeypatch.setattr(Tensor, "to", to)
    return seen


def test_a_copy_to_cuda_starts_from_pinned_memory_and_is_not_waited_for(copies: list[tuple[Any, ...]]) -> None:
    batch = {"input_ids": torch.ones(2, 3, dtype=torch.long), "states": torch.ones(2, 3, 4)}
    assert list(onto(batch, CUDA)) == list(batch)
    assert copies == [("pin", torch.long), ("pin", torch.float32), *[("copy", True, {"non_blocking": True})] * 2]


def test_nothing_is_pinned_for_the_cpu(copies: list[tuple[Any, ...]]) -> None:
    batch = {"input_ids": torch.ones(2, 3, dtype=torch.long)}
    assert onto(batch, torch.device("cpu"))["input_ids"] is batch["input_ids"]
    assert copies == []


@pytest.mark.parametrize("freeze", [None, 1, "encoder"])
def test_every_way_into_a_model_takes_it(freeze: Any, copies: list[tuple[Any, ...]]) -> None:
    task = Task("t", ("bad", "good"))
    model = load_model(ModelConfig(name="tiny-bert", max_length=8, freeze=freeze, cache_mb=0), task, 1)
    batch = model.encode(["a fine film", "a bad one"]).batch(np.arange(2))
    model.device = CUDA
    with torch.autocast("cpu", enabled=False), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "autocast", lambda *_, **__: torch.enable_grad())
        model(batch)
    assert all(kind == "pin" or rest == [True, {"non_blocking": True}] for kind, *rest in copies)
    assert sum(kind == "pin" for kind, *_ in copies) >= len(batch)
