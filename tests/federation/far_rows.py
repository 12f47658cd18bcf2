"""Seventeen methods on a device that is not the CPU: a tensor on the wrong one fails, and the numbers are the CPU's.

Torch counts its devices at the first backward pass, so that this one must be there before: test_far_device.py runs this
file in a process of its own.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from fedstill.common.config import RunConfig
from tests.far_device import far_device, install

from .conftest import Federation

install()
Make = Callable[..., Federation]
Small = Callable[..., RunConfig]
QUICK = ("rounds=1", "data.private=32", "data.public=16", "data.test=8", "report.centralized=false",
         "report.alone=false", "sites.south.model=tiny-bert")  # fmt: skip
FAR = ("central.device=far", "sites.north.device=far", "sites.south.device=far")
METHODS = {
    "fedid": (),
    "fedid, exact": ("method.feedback=exact", "method.jacobian=difference"),
    "fedid, overlapped": ("method.pipeline=1", "method.batch_size=4"),
    "ds-fl": (),
    "mhat": (),
    "fedkd": (),
    "logit-fedavg": (),
    "fedmd": (),
    "cronus": (),
    "adafd": (),
    "feded": (),
    "feddf": (),
    "fedavg": (),
    "fedprox": (),
    "ditto": (),
    "fedadam": (),
    "sinkhorn": ("method.noise_texts=8",),
    "evenhand": ("data.blind=true",),
    "isolated": (),
}  # fmt: skip


def test_tensors_of_two_devices_do_not_mix() -> None:
    with far_device() as name:
        layer = torch.nn.Linear(3, 2).to(name)
        assert layer.weight.device.type == name
        with pytest.raises(RuntimeError, match="same device"):
            layer(torch.ones(1, 3))
        with pytest.raises(RuntimeError, match="same device"):
            torch.nn.functional.cross_entropy(layer(torch.ones(1, 3, device=name)), torch.tensor([1]))
        with pytest.raises((TypeError, RuntimeError)):
            layer.weight.detach().numpy()
        assert layer.weight.detach().cpu().numpy().shape == (2, 3)
        assert (layer.weight * torch.tensor(2.0)).device.type == name  # single numbers may come from the CPU
        assert layer(torch.ones(1, 3, device=name)).sum().item() != 0


@pytest.mark.parametrize("row", METHODS)
def test_a_method_runs_where_its_models_are_and_ends_as_on_the_cpu(row: str, federation: Make, small: Small) -> None:
    settings = (*QUICK, f"method.name={row.partition(',')[0]}", *METHODS[row])
    here = federation(small(*settings))
    here.run()
    with far_device() as name:
        far = federation(small(*settings, *FAR))
        far.record.save_central = lambda *arguments: None  # transformers asks for addresses
        far.run()
        assert {p.device.type for p in far.central.learner.model.parameters()} == {name}
        there = far.central.learner.weights()
    for key, value in here.central.learner.weights().items():
        if "key.bias" in key:  # it changes no attention: its gradient is rounding, which AdamW makes steps of
            continue
        assert np.allclose(value, there[key], atol=1e-5), key
