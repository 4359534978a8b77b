"""A library that asks for its device is shown a GPU, alone; kernels of Triton are not launched."""

import sys
from types import ModuleType

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._device import _device_constructors

from memtrain.trainers.memory_meter.live_tensors import Recorder
from memtrain.trainers.tools.trace.fake_cuda import CARD, as_fake_cuda, without_launches

BRANCHING = """
import torch

def scratch(x):
    if x.is_cuda and x.device.type == "cuda" and torch.cuda.is_available():
        with torch.cuda.device(x.device):
            count = torch.cuda.get_device_properties(x.device).multi_processor_count
            return torch.empty(count, len(x), dtype=torch.float32, device=x.device)
    return torch.empty(1, len(x), device=x.device)

def away(x):
    return x.to("cpu"), torch.zeros(8, device="cpu"), torch.zeros_like(x, device="cuda:0")

class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * scratch(gradient)[0].to(gradient.dtype)
"""


@pytest.fixture
def library():
    """A library that branches on the device, as a module of its own."""
    made = ModuleType("made_up.ops")
    exec(BRANCHING, vars(made))
    return made


def test_only_the_library_takes_the_branch_of_a_gpu(library):
    with FakeTensorMode(), as_fake_cuda("made_up"):
        x = torch.empty(4)
        assert library.scratch(x).shape == (CARD.multi_processor_count, 4)
        assert (x.device.type, x.is_cuda, torch.cuda.is_available()) == ("cpu", False, False)
    with FakeTensorMode(), as_fake_cuda("made"):
        assert library.scratch(torch.empty(4)).shape == (1, 4), "another library, with a name like it"
    with FakeTensorMode():
        assert library.scratch(torch.empty(4)).shape == (1, 4)
    assert library.scratch(torch.empty(4)).shape == (1, 4)


def test_what_a_library_sends_to_the_host_is_not_the_gpus(library):
    with FakeTensorMode(), as_fake_cuda("made_up"), Recorder("cpu") as counted:
        x = torch.empty(1024)
        moved, small, kept = library.away(x)
        assert [t.device.type for t in (moved, small, kept)] == ["meta", "meta", "cpu"]
        assert counted.live_bytes == 2 * 1024 * 4


def test_a_backward_pass_sees_the_gpu_too(library):
    with FakeTensorMode(), as_fake_cuda("made_up"), Recorder("cpu") as counted:
        x = torch.empty(1024, requires_grad=True)
        library.Doubled.apply(x).sum().backward()
        assert counted.peak_bytes >= CARD.multi_processor_count * 1024 * 4


def test_a_device_block_still_makes_tensors_there():
    """torch keeps, from the first such block of a process, which functions it holds for."""
    _device_constructors.cache_clear()
    try:
        with as_fake_cuda("made_up"), torch.device("meta"):
            assert torch.empty(4).is_meta, "a model of random weights would be made in full"
        with torch.device("meta"):
            assert torch.empty(4).is_meta
    finally:
        _device_constructors.cache_clear()


def test_a_kernel_is_not_launched_and_its_wrapper_still_allocates(monkeypatch):
    runtime, launched = ModuleType("triton.runtime.jit"), []

    class KernelInterface:
        def __getitem__(self, grid):
            return lambda *args: launched.append(grid)

    runtime.__dict__["KernelInterface"] = KernelInterface
    for name in ("triton", "triton.runtime"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "triton.runtime.jit", runtime)

    def wrapper(x):
        out = torch.empty_like(x)
        KernelInterface()[(1,)](x, out)
        return out

    with without_launches(), Recorder("cpu") as counted:
        x = torch.ones(256)
        out = wrapper(x)
        assert counted.live_bytes == 2 * 1024
    assert launched == []
    wrapper(out)
    assert launched == [(1,)]
