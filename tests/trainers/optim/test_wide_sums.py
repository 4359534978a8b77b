"""Gradients of bfloat16 weights, added over micro-batches and ranks, against one large batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from memtrain.trainers.build.step import OptimizerStep
from memtrain.trainers.distributed import ddp as exchange
from memtrain.trainers.distributed.ddp import GradientAllReduce
from memtrain.trainers.optim.step import DistributedStep, narrowed, sum_wide, update
from memtrain.trainers.protocols.method import Loss

WIDTH = 48


class Squares:
    """A method that learns rows of numbers: the sum of squared outputs over the step's rows."""

    name = "squares"

    def loss(self, model: nn.Module, micro_batch: Tensor, *, denominator: float, want_stats: bool) -> Loss:
        """Its mean over the step."""
        return Loss(model(micro_batch).float().square().sum() / denominator, {})


def small_model() -> nn.Module:
    """Two maps with a norm between, in bfloat16.

    No LayerNorm: torch's own kernel for a CPU adds the rows of a large batch in bfloat16, 6 % off.
    """
    torch.manual_seed(0)
    layers = (nn.Linear(WIDTH, WIDTH), nn.RMSNorm(WIDTH), nn.Tanh(), nn.Linear(WIDTH, 8))
    return nn.Sequential(*layers).bfloat16()


def rows(count: int) -> Tensor:
    """[count, WIDTH] rows that have much in common, as those of a language have."""
    generator = torch.Generator().manual_seed(1)
    return (torch.randn(count, WIDTH, generator=generator) + 0.7).bfloat16()


def gradients(model: nn.Module) -> Tensor:
    """All gradients end to end, and gone from the model."""
    found = torch.cat([p.grad.double().reshape(-1) for p in model.parameters() if p.grad is not None])
    model.zero_grad(set_to_none=True)
    return found


def summed(
    model: nn.Module, micro_batches: list[Tensor], engine: DistributedStep, denominator: float
) -> Tensor:
    """The gradients of a step of `micro_batches`."""
    step = OptimizerStep(model, Squares(), torch.optim.SGD(model.parameters()), (), engine)
    step.passes(
        micro_batches, denominator=denominator, num_micro_batches=len(micro_batches), want_stats=False
    )
    engine.finish()
    return gradients(model)


def off(found: Tensor, truth: Tensor) -> float:
    """Length of the difference over that of the truth."""
    return float((found - truth).norm() / truth.norm())


def large_batch(every: Tensor, dtype: torch.dtype) -> Tensor:
    """The gradient of all rows at once: the same bfloat16 weights and rows, computed in a precision."""
    return summed(small_model().to(dtype), [every.to(dtype)], DistributedStep(), float(len(every)))


@pytest.mark.parametrize("num_micro_batches", [64, 1024, 4096])
def test_accumulation_in_bfloat16_is_one_large_batch(num_micro_batches: int):
    """4,096 rows in micro-batches, against all of them at once in float32; 2e-4 to 3e-4 were measured.

    One large batch in bfloat16 is 1.6e-3 off: its gradient is rounded at the end, and each product within.
    """
    every = rows(4096)
    truth = large_batch(every, torch.float32)
    found = summed(small_model(), list(every.chunk(num_micro_batches)), DistributedStep(), 4096.0)
    assert off(found, truth) < 1e-3
    assert off(found, truth) < off(large_batch(every, torch.bfloat16), truth) < 2e-3


def test_two_micro_batches_are_no_further_off_than_one():
    """Each of two gradients is rounded to bfloat16 once, as the one of a large batch is."""
    every = rows(4096)
    truth = large_batch(every, torch.float32)
    found = summed(small_model(), list(every.chunk(2)), DistributedStep(), 4096.0)
    assert off(found, truth) < off(large_batch(every, torch.bfloat16), truth)


def test_a_sum_in_bfloat16_would_be_seen():
    """The same with the sums that torch makes of itself."""
    every, plain = rows(4096), DistributedStep(begin=lambda model, num_micro_batches: None)
    found = summed(small_model(), list(every.chunk(4096)), plain, 4096.0)
    assert off(found, large_batch(every, torch.float32)) > 0.1


class Ranks:
    """Ranks that take turns: what each sends waits until the last one has sent it."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.sent: list[list[Tensor]] = [[] for _ in range(world)]
        self.now = 0

    def all_reduce(self, tensor: Tensor, *, async_op: bool) -> Any:
        """Keep what this rank sends; the last one sums it, for all."""
        self.sent[self.now].append(tensor)
        if self.now == self.world - 1:
            place = len(self.sent[self.now]) - 1
            total = sum(one[place] for one in self.sent)
            for one in self.sent:
                one[place].copy_(total)
        return _Done()


class _Done:
    def wait(self) -> None:
        """Nothing to wait for."""


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    made = Ranks(8)
    monkeypatch.setattr(exchange.dist, "all_reduce", made.all_reduce)
    monkeypatch.setattr(dist, "all_reduce", made.all_reduce)
    return made


def test_eight_ranks_of_512_micro_batches_are_one_large_batch(ranks: Ranks):
    """What the last rank gets is the sum of all, made of its own 512 and the seven that were sent before."""
    every = rows(4096)
    for number, part in enumerate(every.chunk(ranks.world)):
        ranks.now, model = number, small_model()
        found = summed(
            model, list(part.chunk(512)), GradientAllReduce(list(model.parameters())).engine(), 4096.0
        )
    assert off(found, large_batch(every, torch.float32)) < 1e-3
    assert {one.dtype for one in ranks.sent[-1]} == {torch.float32, torch.int32}


def test_ranks_with_one_micro_batch_each_send_float32(ranks: Ranks):
    every = rows(64)
    for number, part in enumerate(every.chunk(ranks.world)):
        ranks.now, model = number, small_model()
        found = summed(model, [part], GradientAllReduce(list(model.parameters())).engine(), 64.0)
    assert off(found, large_batch(every, torch.float32)) < 2e-3
    assert {one.dtype for one in ranks.sent[-1]} == {torch.float32, torch.int32}


def test_a_gradient_that_is_alone_stays_in_bfloat16():
    model = small_model()
    for num_micro_batches, dtype in ((3, torch.float32), (1, torch.bfloat16), (2, torch.float32)):
        sum_wide(model, num_micro_batches)
        model(rows(4)).float().sum().backward()
        assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {dtype}
        model.zero_grad(set_to_none=True)


def test_float32_and_frozen_weights_are_left_as_they_are():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False, dtype=torch.bfloat16))
    model[1].weight.requires_grad_(False)
    sum_wide(model, 2)
    assert (model[0].weight.grad_dtype, model[1].weight.grad_dtype) == (torch.float32, torch.bfloat16)


def test_an_optimizer_of_bfloat16_weights_gets_each_sum_rounded_once():
    """Pure bfloat16: AdamW wants gradients in its weights' precision; the next step sums in float32 again."""
    model, every = small_model(), rows(16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    seen: list[torch.dtype] = []

    def step(optimizer: torch.optim.Optimizer) -> None:
        seen.extend(p.grad.dtype for p in model.parameters() if p.grad is not None)
        optimizer.step()

    before = [p.detach().clone() for p in model.parameters()]
    for _ in range(2):
        passes = OptimizerStep(model, Squares(), optimizer, ()).passes
        passes(every.chunk(4), denominator=16.0, num_micro_batches=4, want_stats=False)
        update(
            optimizer, list(model.parameters()), lr=1e-2, max_grad_norm=1.0, engine=DistributedStep(step=step)
        )
        assert all(p.grad is None and p.grad_dtype is torch.float32 for p in model.parameters())
    assert set(seen) == {torch.bfloat16}
    assert not any(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def test_nothing_is_narrowed_that_is_narrow():
    weight = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    weight.grad = torch.ones_like(weight)
    with narrowed([weight]):
        assert weight.grad is not None
    assert weight.grad is not None
