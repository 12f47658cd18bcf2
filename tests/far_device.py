"""A device that is not there: tensors that say they are on `far:0`, are computed on the CPU, and mix as CUDA's.

An operation on tensors of both devices fails as it would on a GPU; single numbers may be mixed, and index tensors may
be on the CPU. `.numpy()` on a far tensor fails too. Everything else gives the CPU's numbers, to the last bit. `install`
registers the device once a process, by torch's hook for backends written in Python.
"""

from __future__ import annotations

import types
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "far"
LIBRARY = torch.library.Library("aten", "IMPL")
MAY_MIX = ("aten::_to_copy", "aten::copy_", "aten::_copy_from")  # from one device to another
INDEXED = ("aten::index", "aten::index_put_", "aten::index_put", "aten::_index_put_impl_")  # indices may be on the CPU


class Far(torch.Tensor):
    """A tensor on the far device; `inner` has its numbers."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Far:
        made: Far = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=f"{NAME}:0",
        )
        return made

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Far({self.inner!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(func, args, kwargs or {})


def is_far(value: Any) -> bool:
    return isinstance(value, str | torch.device) and torch.device(value).type == NAME


def compute(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Compute an operation on the CPU, if its tensors are on one device."""
    name = func._schema.name
    given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    far = [tensor for tensor in given if isinstance(tensor, Far)]
    looked_at = [args[0], *args[2:]] if name in INDEXED else (args, kwargs)
    here = [t for t in tree_leaves(looked_at) if isinstance(t, torch.Tensor) and not isinstance(t, Far) and t.dim()]
    if far and here and name not in MAY_MIX:
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, {NAME}:0 and cpu! ({name})"
        )
    goes = kwargs.get("device")
    lands = is_far(goes) if goes is not None else bool(far)
    if name == "aten::copy_":
        lands = isinstance(args[0], Far)
    kwargs = {**kwargs, **({"device": torch.device("cpu")} if is_far(goes) else {})}
    if kwargs.get("pin_memory"):
        kwargs["pin_memory"] = False
    out = func(*tree_map(_inner, args), **tree_map(_inner, kwargs))
    if not lands:
        return out
    wrapped = tree_map(lambda x: Far(x) if isinstance(x, torch.Tensor) else x, out)
    return return_and_correct_aliasing(func, args, kwargs, wrapped) if far else wrapped


def _inner(value: Any) -> Any:
    return value.inner if isinstance(value, Far) else value


class _Mode(TorchDispatchMode):
    """Makes new tensors on the far device, which no argument of theirs asks for by its type."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(func, args, kwargs or {})


def install() -> None:
    """Register the device, once a process."""
    if hasattr(torch, NAME):
        return
    module = types.ModuleType(f"torch.{NAME}")
    functions = {
        "_lazy_init": lambda: None, "is_initialized": lambda: True, "is_available": lambda: True,
        "device_count": lambda: 1, "current_device": lambda: 0, "_is_in_bad_fork": lambda: False,
        "manual_seed_all": lambda seed: None, "get_amp_supported_dtype": lambda: [torch.bfloat16],
        "get_rng_state": lambda device=0: torch.get_rng_state(), "set_rng_state": lambda state, device=0: None,
    }  # fmt: skip
    for name, function in functions.items():
        setattr(module, name, function)
    _setup_privateuseone_for_python_backend(NAME, backend_module=module)
    # what torch's own code makes beneath the mode, such as masks of attention
    LIBRARY.impl("empty_strided", lambda *sizes, **kind: Far(torch.empty_strided(*sizes, **_here(kind))), "PrivateUse1")
    LIBRARY.impl("empty.memory_format", lambda *sizes, **kind: Far(torch.empty(*sizes, **_here(kind))), "PrivateUse1")
    LIBRARY.impl("_copy_from", _copied, "PrivateUse1")


def _copied(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    _inner(target).copy_(_inner(source))
    return target


def _here(kind: dict[str, Any]) -> dict[str, Any]:
    """The same tensor on the CPU."""
    return {**kind, "device": "cpu", "pin_memory": False}


@contextmanager
def far_device() -> Any:
    """Have the far device inside. Inference mode is `no_grad` there: its tensors cannot be views of wrapped ones."""
    install()
    with mock.patch.object(torch, "inference_mode", torch.no_grad), _Mode():
        yield NAME
