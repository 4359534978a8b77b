"""The passes of a step: what is freed between its micro-batches."""

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from memtrain.trainers.build.step import OptimizerStep
from memtrain.trainers.protocols.method import Loss

HELD: list[weakref.ref[Tensor]] = []


class Holding(torch.autograd.Function):
    """An operator that keeps its input as an attribute, which no backward pass frees (8-bit products do)."""

    @staticmethod
    def forward(ctx: Any, input_N: Tensor) -> Tensor:
        ctx.kept = input_N * 1
        HELD.append(weakref.ref(ctx.kept))
        return input_N * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * 2


class Held:
    """A method that notes how many micro-batches' tensors are alive when a loss begins."""

    def __init__(self) -> None:
        self.alive: list[int] = []

    def loss(self, model: nn.Linear, micro_batch: Tensor, *, denominator: float, want_stats: bool) -> Loss:
        self.alive.append(sum(one() is not None for one in HELD))
        return Loss(Holding.apply(model(micro_batch)).sum() / denominator, {})


def test_the_graph_of_a_micro_batch_is_gone_before_the_next_is_computed():
    HELD.clear()
    model, method = nn.Linear(3, 2), Held()
    micro_batches = [torch.ones(4, 3), torch.ones(4, 3), torch.ones(4, 3)]
    step: Any = OptimizerStep(model, method, torch.optim.SGD(model.parameters()), ())  # pyright: ignore
    reported = step.passes(micro_batches, denominator=1.0, num_micro_batches=3, want_stats=False)
    assert method.alive == [0, 0, 0]
    assert model.weight.grad is not None
    assert torch.equal(model.weight.grad, torch.full((2, 3), 24.0))
    assert not reported["loss"].requires_grad
