"""An optimizer step that memory breaks off anywhere is made whole: the bits of the undisturbed one."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import optimization

from memtrain.errors import OutOfMemory
from memtrain.recipes.sections.optim import Optim
from memtrain.trainers.optim.adafactor import Adafactor
from memtrain.trainers.optim.build import build_optimizer
from memtrain.trainers.optim.muon import HiddenMuon
from memtrain.trainers.optim.step import step_whole

KINDS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "adafactor": {},
    "muon": {},
    "float32 copies": {"master_weights": True, "dtype": "bfloat16"},
    "offloaded": {"optimizer_offload": True},
    "offloaded, float32 copies": {"optimizer_offload": True, "master_weights": True, "dtype": "bfloat16"},
}


class Breaker(TorchDispatchMode):
    """Fails at one allocation, the `at`-th."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at, self.count = at, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returns = func._schema.returns
        if returns and all(one.alias_info is None for one in returns):
            self.count += 1
            if self.count == self.at:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")
        return func(*args, **(kwargs or {}))


def trained(kind: str, make_settings: Any, at: int) -> tuple[list[Tensor], list[int]]:
    """Weights after three steps, the first two broken at an allocation; allocations of each."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4), nn.LayerNorm(4))
    options = KINDS[kind]
    if "master_weights" in options:
        model = model.bfloat16()
    name: Any = kind if kind in ("adafactor", "muon") else "adamw"
    settings = make_settings(optimizer=name, **options)
    optimizer = build_optimizer(model, Optim(kind=name, lr=1e-2, weight_decay=0.1), settings)
    counts: list[int] = []
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        breaker = Breaker(at if step < 2 else 0)
        with breaker:
            step_whole(optimizer)
        optimizer.zero_grad()
        counts.append(breaker.count)
    return [parameter.detach() for parameter in model.parameters()], counts


MANY = 11
"""Kinds of long steps are broken at every n-th allocation, and at every one in the slow test."""


@pytest.mark.parametrize(
    ("kind", "every"),
    [(kind, MANY if kind in ("adafactor", "muon") else 1) for kind in KINDS]
    + [pytest.param(kind, 1, marks=pytest.mark.slow) for kind in ("adafactor", "muon")],
)
def test_a_step_broken_at_any_allocation_is_made_whole(make_settings, kind: str, every: int):
    undisturbed, counts = trained(kind, make_settings, 0)
    for at in range(1, max(counts) + 1, every):
        broken, _ = trained(kind, make_settings, at)
        assert all(torch.equal(a, b) for a, b in zip(undisturbed, broken, strict=True)), f"broken at {at}"


def test_a_step_that_never_succeeds_ends_the_run():
    class Never(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    with pytest.raises(OutOfMemory, match="in the optimizer step"):
        step_whole(Never([parameter], lr=0.1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adafactor_is_that_of_transformers(dtype: torch.dtype):
    torch.manual_seed(0)
    ours = [nn.Parameter(torch.randn(33, 17).to(dtype)), nn.Parameter(torch.randn(9).to(dtype))]
    theirs = copy.deepcopy(ours)
    options: dict[str, Any] = {"scale_parameter": False, "relative_step": False, "weight_decay": 0.1}
    one, other = Adafactor(ours, lr=1e-2, **options), optimization.Adafactor(theirs, lr=1e-2, **options)
    for _ in range(4):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn(a.shape).to(dtype)
            b.grad = a.grad.clone()
        one.step()
        other.step()
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("size", [(32, 16), (16, 32), (8, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_muon_is_that_of_torch(dtype: torch.dtype, size: tuple[int, int]):
    torch.manual_seed(0)
    a = nn.Parameter(torch.randn(size).to(dtype))
    b = copy.deepcopy(a)
    options: dict[str, Any] = {"momentum": 0.9, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}
    one, other = HiddenMuon([a], lr=1e-2, **options), torch.optim.Muon([b], lr=1e-2, **options)
    for _ in range(4):
        a.grad = torch.randn(size).to(dtype)
        b.grad = a.grad.clone()
        one.step()
        other.step()
    assert torch.equal(a, b)
