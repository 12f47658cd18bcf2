"""Every method and family on a device that is not the CPU: a tensor on the wrong one fails, the numbers are the CPU's.

Torch counts its devices at the first backward pass, so that this one must be there before: test_far_device.py runs this
file in a process of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from fedstill.common.config import MethodConfig, RunConfig
from fedstill.strategies import METHODS as METHODS_KNOWN
from tests.decoders import make_decoders
from tests.far_device import far_device, install

from .conftest import Federation, precise
from .mixed import mixed_run

install()
Make = Callable[..., Federation]
Small = Callable[..., RunConfig]
QUICK = ("rounds=1", "data.private=32", "data.public=16", "data.test=8", "report.centralized=false",
         "report.alone=false", "sites.south.model=tiny-bert")  # fmt: skip
THIRD = "a third site"
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
    "adafd, by class": ("method.per_class=true",),
    "feded": (),
    "feddf": (),
    "fedavg": (),
    "fedprox": (),
    "fedbn": (),
    "ditto": (),
    "spfl": (),
    "percfl": (),
    "fedadam": (),
    "fedmedian": (),
    "fedtrimmedavg": (),
    "krum": ("method.num_malicious_nodes=0", THIRD),
    "multikrum": ("method.num_malicious_nodes=0", THIRD),
    "bulyan": ("method.num_malicious_nodes=0", THIRD),
    "feddrs": ("method.pseudo_texts=2", "method.sample_steps=1", "method.iterations=1", "method.post_iterations=1"),
    "fedaux": ("method.extractor=tiny-bert", "method.preset=feddrs", "method.participation=1.0"),
    "fedkd-mutual": (),
    "sinkhorn": ("method.noise_texts=8",),
    "sinkhorn, off a line": ("method.noise_texts=8", "method.support=both", "method.solver=log_sinkhorn"),
    "entropy": ("method.noise_texts=8",),
    "evenhand": ("data.blind=true",),
    "isolated": (),
    "centralized": (),
    "ds-fl, summed": ("exchange.secure=true", THIRD),
    "ds-fl, early": ("method.pipeline=1", "central.batch_size=4"),
    "ds-fl, RoBERTa and XLNet": ("sites.north.model=tiny-roberta", "sites.south.model=tiny-xlnet"),
    "ds-fl, frozen encoders": ("sites.north.freeze=encoder", "sites.south.freeze=1", "central.freeze=encoder"),
    "ds-fl, adapters": ("central.lora.r=2", "sites.north.lora.r=2", "sites.south.lora.r=2"),
    "ds-fl, for large models": ("sites.north.accumulate=2", "sites.north.recompute=true", "central.accumulate=2"),
}  # fmt: skip
TOUCHY = ("fedid, exact", "fedaux", "sinkhorn, off a line")  # float32 differs in its last bit, and Adam steps on that


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
    settings = [*QUICK, f"method.name={row.partition(',')[0]}", *(one for one in METHODS[row] if one != THIRD)]
    third = THIRD in METHODS[row]
    config = with_third(small(*settings)) if third else small(*settings)
    compared(federation, precise(config) if row in TOUCHY else config)


def with_third(config: RunConfig) -> RunConfig:
    """The run with one more site."""
    return config.model_copy(update={"sites": [*config.sites, config.sites[0].model_copy(update={"name": "east"})]})


def compared(
    federation: Make, config: RunConfig, weights: bool = True, device: str | list[str] = "far", atol: float = 1e-5
) -> None:
    """Run it here and there, and compare the central model's and the sites' weights, or the last round's loss alone."""
    here = federation(config)
    here.run()
    away = {"device": device}
    sites = [site.model_copy(update=away) for site in config.sites]
    with far_device() as name:
        far = federation(config.model_copy(update={"central": config.central.model_copy(update=away), "sites": sites}))
        far.record.save_central = lambda *arguments: None  # transformers asks for addresses
        far.run()
        for learner in (far.central.learner, *(node.learner for node in far.nodes)):
            assert {one.type for one in learner.model.devices} == ({name} if device == name else {name, "cpu"})
        theirs = [learner.weights() for learner in (far.central.learner, *(node.learner for node in far.nodes))]
    losses = [made.events("round_finished")[-1]["metrics"]["loss"] for made in (here, far)]
    assert losses[0] == pytest.approx(losses[1], rel=0.02)
    for learner, there in zip([here.central.learner, *(node.learner for node in here.nodes)], theirs, strict=True):
        for key, value in learner.weights().items():
            if (
                "key.bias" in key or not weights
            ):  # it changes no attention: its gradient is rounding, which AdamW makes steps of
                continue
            assert np.allclose(value, there[key], atol=atol), (learner.name, key)


@pytest.mark.parametrize("method", ["atc", "fedavg", "fedavg-st"])
def test_sites_with_tasks_of_their_own(method: str, federation: Make, tmp_path: Path) -> None:
    config = mixed_run(tmp_path / "texts", "rounds=2", "method.assign_rounds=1")
    if method != "atc":
        groups = {"groups": {"sea": ["ann", "cat"], "kitchen": ["bob", "dan"]}} if method == "fedavg-st" else {}
        config = config.model_copy(update={"method": MethodConfig(name=method, **groups), "rounds": 1})
    compared(federation, config, weights=False)  # which these models have in float32 only


def test_t5(federation: Make, small: Small) -> None:
    """Its label words share what stands before them, so that many gradients are rounding alone: no weights."""
    models = ("central.model=tiny-t5", "sites.north.model=tiny-t5", "sites.south.model=tiny-t5")
    compared(federation, small(*QUICK, "method.name=ds-fl", *models), weights=False)


@pytest.mark.parametrize("answer", ["words", "head"])
def test_decoder_only_models(answer: str, federation: Make, small: Small, tmp_path: Path) -> None:
    decoders = make_decoders(tmp_path / "models")
    config = small(*QUICK, "method.name=ds-fl", f"sites.north.model={decoders['gpt2']}", f"sites.north.answer={answer}",
                   f"sites.south.model={decoders['llama']}", f"sites.south.answer={answer}")  # fmt: skip
    compared(federation, precise(config), weights=answer == "head")  # words: as with T5


SPREAD = {
    "fedid": (),
    "fedavg": (),
    "fedavg, adapters": ("central.lora.r=2", "sites.north.lora.r=2", "sites.south.lora.r=2"),
    "adafd": (),
    "feddrs": METHODS["feddrs"],
    "fedkd-mutual": (),
    "ds-fl, RoBERTa and XLNet": METHODS["ds-fl, RoBERTa and XLNet"],
    "ds-fl, T5": ("central.model=tiny-t5", "sites.north.model=tiny-t5", "sites.south.model=tiny-t5"),
    "ds-fl, for large models": ("sites.north.accumulate=2", "sites.north.recompute=true", "central.accumulate=2"),
    "ds-fl, frozen": ("sites.north.freeze=encoder", "sites.south.freeze=1", "central.freeze=encoder"),
    "ds-fl, T5, frozen": ("central.model=tiny-t5", "sites.north.model=tiny-t5", "sites.south.model=tiny-t5",
                          "sites.north.freeze=1", "sites.south.freeze=1", "sites.south.cache_mb=0"),
    "ds-fl, frozen without a cache": ("sites.north.freeze=1", "sites.north.cache_mb=0", "sites.south.freeze=1"),
}  # fmt: skip
EXACT = [row for row in SPREAD if "XLNet" not in row]  # which has no float64
TIED = "ds-fl, T5"  # its tied embeddings come apart on a device written in Python, and their weights differ then


@pytest.mark.parametrize("devices", [["far", "cpu"], ["cpu", "far"]], ids=" then ".join)
@pytest.mark.parametrize("row", SPREAD)
def test_a_model_on_two_devices_is_the_model_on_one(
    row: str, devices: list[str], federation: Make, small: Small
) -> None:
    config = small(*QUICK, f"method.name={row.partition(',')[0]}", *SPREAD[row])
    exact = row in EXACT
    config = precise(config) if exact else config
    compared(federation, config, weights=TIED not in row, device=devices, atol=1e-9 if exact else 1e-5)


def test_decoders_on_two_devices(federation: Make, small: Small, tmp_path: Path) -> None:
    decoders = make_decoders(tmp_path / "models")
    config = small(*QUICK, "method.name=ds-fl", f"sites.north.model={decoders['gpt2']}",
                   f"sites.south.model={decoders['llama']}", "sites.south.answer=head")  # fmt: skip
    compared(federation, precise(config), device=["far", "cpu"], weights=False)


def test_every_method_is_here() -> None:
    covered = {row.partition(",")[0] for row in METHODS} | {"atc", "fedavg-st"}
    assert covered == {name for name, method in METHODS_KNOWN.items() if method.__module__.startswith("fedstill.")}
