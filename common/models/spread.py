"""One model on several devices: each takes the next few of its layers, the first also what stands around them.

Layers run one after another, so devices take turns: this is for models that one device cannot hold, not for speed.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from fedstill.common.models.text_model import ModelError

_placed: WeakSet[nn.Module] = WeakSet()  # sites of one process share a frozen encoder


def place(net: Any, devices: Sequence[torch.device]) -> Any:
    """Return the model on its devices; what it is called with and what it returns is on the first one."""
    if len(devices) == 1:
        return net.to(devices[0])
    if net in _placed:
        return net
    stacks = _stacks(net)
    layers = [layer for stack in stacks for layer in stack]
    inside = {id(module) for layer in layers for module in layer.modules()}
    around = [module for module in net.modules() if id(module) not in inside]
    counts = shares(_size(around), [_size(layer.modules()) for layer in layers], len(devices))
    if counts is None:
        raise ModelError(
            f"device: a {net.config.model_type} model of {len(layers)} layers cannot be spread over {len(devices)} "
            f"devices; name at most {len(layers) + 1} of them"
        )
    for module in around:
        module._apply(lambda tensor: tensor.to(devices[0]), recurse=False)
        if _own(module):  # a stack that is left early, as by `freeze`, hands on what its last layer made
            _bring_inputs(module, devices[0])
    for device, count in zip(devices, counts, strict=True):
        for layer in layers[:count]:
            _bring_inputs(layer.to(device), device)
        layers = layers[count:]
    for stack in stacks:
        stack[-1].register_forward_hook(lambda module, inputs, output: _brought(output, devices[0]))
    _placed.add(net)
    return net


def shares(around: int, layers: Sequence[int], count: int) -> list[int] | None:
    """Return how many layers in a row each device takes, so that the fullest holds as little as can be.

    `around` and `layers` are sizes in bytes; the first device holds `around`, and takes no layer if that is best.
    None: there are too few layers for every other device to take one.
    """
    if len(layers) < count - 1:
        return None
    ends = [0, *accumulate(layers)]
    # of the devices so far, for each number of layers that they take: their loads, the fullest first, and their counts
    best = {upto: ([around + ends[upto]], [upto]) for upto in range(len(ends))}
    for number in range(1, count):
        best = {
            upto: min(
                (sorted([*best[begin][0], ends[upto] - ends[begin]], reverse=True), [*best[begin][1], upto - begin])
                for begin in range(number - 1, upto)
            )
            for upto in range(number, len(ends))
        }
    return best[len(layers)][1]


def _stacks(net: Any) -> list[list[nn.Module]]:
    """Return the lists of layers in the order in which they run."""
    base = net.get_base_model() if hasattr(net, "peft_config") else net
    halves = [base.get_encoder(), base.get_decoder()] if base.config.is_encoder_decoder else [base.base_model]
    return [list(getattr(*layer_list(half, "device"))) for half in halves]


def layer_list(part: Any, key: str) -> tuple[nn.Module, str]:
    """Return the module that holds the layers of an encoder or decoder, and under which name; `key` wants to know."""
    for name, module in part.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == part.config.num_hidden_layers:
            owner, _, attribute = name.rpartition(".")
            return part.get_submodule(owner), attribute
    cure = "freeze the encoder" if key == "freeze" else "name one device"
    raise ModelError(f"{key}: no list of layers was found in a {part.config.model_type} model; {cure}")


def _own(module: nn.Module) -> list[Tensor]:
    """Return a module's own parameters and buffers, without those of its parts."""
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]


def _size(modules: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for module in modules for tensor in _own(module))


def _bring_inputs(module: nn.Module, device: torch.device) -> None:
    """Have a module's inputs brought to its device whenever it is called."""
    module.register_forward_pre_hook(
        lambda _, inputs, named: (_brought(inputs, device), _brought(named, device)), with_kwargs=True
    )


def _brought(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if type(value) in (tuple, list):
        return type(value)(_brought(item, device) for item in value)
    return {key: _brought(item, device) for key, item in value.items()} if type(value) is dict else value
