"""Libraries that ask which device they are on: to them alone, tensors without data are on a CUDA GPU.

A trace plays the GPU by fake `cpu` tensors (see fake.py). torch itself, transformers and memtrain go on
seeing those. Code of the modules that are named sees `cuda:0` instead, may make tensors there, and is told of
a card. Kernels that Triton compiles are not launched: what their wrappers allocate stays.

Plain patches on purpose: a TorchFunctionMode is popped while it handles a call, so that hooks and autograd
functions would run without it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import wraps
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from memtrain.trainers.tools.trace.fake_host import HOST

CARD = SimpleNamespace(
    name="NVIDIA H100",
    major=9,
    minor=0,
    multi_processor_count=132,
    total_memory=80 << 30,
    warp_size=32,
    gcnArchName="",
)
"""The card that libraries are told of: they size small buffers and choose kernels by it. Whatever card is
planned for, any since Ampere takes the same branches in Liger 0.8.5 (read)."""
GPU = torch.device("cuda", 0)
_MAKERS = (
    "empty zeros ones full rand randn arange empty_strided randint linspace tensor as_tensor empty_like "
    "zeros_like ones_like full_like rand_like randn_like"
)
_CARD_CALLS: dict[str, Callable[..., Any]] = {
    "is_available": lambda: True,
    "device_count": lambda: 1,
    "current_device": lambda: 0,
    "get_device_name": lambda *which: CARD.name,
    "get_device_capability": lambda *which: (CARD.major, CARD.minor),
    "get_device_properties": lambda *which: CARD,
    "device": lambda *which: nullcontext(),
    "set_device": lambda *which: None,
    "synchronize": lambda *which: None,
}


@contextmanager
def as_fake_cuda(*names: str) -> Iterator[None]:
    """Modules of these names, and those inside them, are on a GPU.

    What they put on `cpu` is the host's; what they make without naming a device is counted as the GPU's.
    """

    is_fooled = called_from(*names)
    # torch notes at its first use which functions `with torch.device(...)` is for: these, not stand-ins.
    with torch.device("meta"):
        torch.empty(0)
    with ExitStack() as undo:
        for name, fake in _CARD_CALLS.items():
            undo.enter_context(
                replaced(torch.cuda, name, _either(getattr(torch.cuda, name), fake, is_fooled))
            )
        for name in _MAKERS.split():
            undo.enter_context(replaced(torch, name, _moving(getattr(torch, name), is_fooled)))
        plain: Any = FakeTensor.device
        to: Any = torch.Tensor.to
        undo.enter_context(replaced(FakeTensor, "to", _moving(to, is_fooled)))
        undo.enter_context(
            replaced(
                FakeTensor,
                "device",
                _property_by_caller(plain.fget, lambda t: _seen(plain.fget(t)), is_fooled, plain.fset),
            )
        )
        undo.enter_context(
            replaced(
                FakeTensor,
                "is_cuda",
                _property_by_caller(_never, lambda t: plain.fget(t).type == "cpu", is_fooled),
            )
        )
        yield


def called_from(*names: str) -> Callable[[], bool]:
    """Whether the function that asks was called by a module of these names, or inside them."""

    def is_called() -> bool:
        name = sys._getframe(2).f_globals.get("__name__", "")
        return any(name == one or name.startswith(f"{one}.") for one in names)

    return is_called


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """`owner.name` is `value` inside."""
    has_own, before = name in vars(owner), vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if has_own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


@contextmanager
def without_launches() -> Iterator[None]:
    """Triton's kernels are not launched inside; nothing is done where Triton is not installed."""
    if "triton.runtime.jit" not in sys.modules and find_spec("triton") is None:
        yield
        return
    from triton.runtime.jit import KernelInterface  # pyright: ignore[reportMissingImports]

    with replaced(KernelInterface, "__getitem__", lambda kernel, grid: lambda *args, **kwargs: None):
        yield


def _seen(device: torch.device) -> torch.device:
    return {"cpu": GPU, HOST: torch.device("cpu")}.get(device.type, device)


def _meant(device: Any) -> Any:
    """The device that stands for a library's; anything else as it is."""
    if not isinstance(device, str | torch.device):
        return device
    return {"cuda": torch.device("cpu"), "cpu": torch.device(HOST)}.get(str(device).partition(":")[0], device)


def _never(tensor: FakeTensor) -> bool:
    return False


def _either(plain: Any, fake: Callable[..., Any], is_fooled: Callable[[], bool]) -> Any:
    @wraps(plain, updated=())
    def called(*args: Any, **kwargs: Any) -> Any:
        return (fake if is_fooled() else plain)(*args, **kwargs)

    return called


def _moving(plain: Any, is_fooled: Callable[[], bool]) -> Any:
    """`plain` with the devices among its arguments translated."""

    @wraps(plain, updated=())
    def called(*args: Any, **kwargs: Any) -> Any:
        if is_fooled():
            args = tuple(map(_meant, args))
            if "device" in kwargs:
                kwargs["device"] = _meant(kwargs["device"])
        return plain(*args, **kwargs)

    return called


def _property_by_caller(
    plain: Callable[[Any], Any],
    fake: Callable[[Any], Any],
    is_fooled: Callable[[], bool],
    setter: Callable[[Any, Any], None] | None = None,
) -> property:
    return property(lambda tensor: (fake if is_fooled() else plain)(tensor), setter)
