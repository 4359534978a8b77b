"""An optimizer step: forward and backward of its micro-batches, then the update. Traced by the planner."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from memtrain.trainers.optim.atomic_step import step_whole
from memtrain.trainers.optim.build import clip_gradients, takes_float32
from memtrain.trainers.optim.wide_sums import narrowed, sum_wide
from memtrain.trainers.protocols.method import Method


@dataclass(frozen=True, slots=True)
class DistributedStep:
    """Engine by which a step reaches the other ranks, and the weights. The default is one process with plain
    autograd."""

    begin: Callable[[nn.Module, int], None] = sum_wide
    """Called with the model and the number of micro-batches before the first of a step."""
    backward: Callable[[Tensor], None] = torch.autograd.backward
    last_pass: Callable[[], AbstractContextManager[None]] = nullcontext
    """Context of the last backward pass of a step: gradients may be exchanged as they are made."""
    finish: Callable[[], None] = lambda: None
    """Makes gradients the sums over all ranks; called by all of them, after a pass that broke off as well."""
    clip: Callable[[Sequence[nn.Parameter], float], Tensor] = clip_gradients
    """Scales gradients down to a norm; the norm before, as a scalar on the device."""
    step: Callable[[Optimizer], None] = step_whole
    """Moves the weights by their gradients."""
    dry_step: Callable[[bool], AbstractContextManager[None]] = lambda makes_states: nullcontext()
    """Context in which a backward pass moves no weight, and may make missing optimizer states."""


def forward_backward(
    model: nn.Module,
    method: Method,
    micro_batches: Iterable[Any],
    *,
    denominator: float,
    engine: DistributedStep,
    num_micro_batches: int,
    want_stats: bool,
    seed_micro_batch: Callable[[int], None] = lambda index: None,
) -> dict[str, Tensor]:
    """Accumulate the gradients of a step; the sums of this rank, with `loss`, on the device.

    Losses are divided by the denominator of the whole step, so their sum over micro-batches and ranks is the
    mean of one large batch. The caller finishes the exchange. No host synchronisation happens here.
    """
    totals: dict[str, Tensor] = {}
    engine.begin(model, num_micro_batches)
    for index, micro_batch in enumerate(micro_batches):
        seed_micro_batch(index)
        is_last = index == num_micro_batches - 1
        loss = method.loss(model, micro_batch, denominator=denominator, want_stats=want_stats)
        with engine.last_pass() if is_last else nullcontext():
            engine.backward(loss.value)
        for name, value in {"loss": loss.value.detach(), **loss.sums}.items():
            totals[name] = totals[name] + value if name in totals else value
        # Some operators hold tensors that no backward pass frees as long as the graph is there (8-bit
        # products their inputs): it goes before the next micro-batch makes its own.
        del loss
    return totals


def update(
    optimizer: Optimizer,
    parameters: Sequence[nn.Parameter],
    *,
    lr: float,
    max_grad_norm: float | None,
    engine: DistributedStep,
) -> Tensor:
    """Clip, step, and free the gradients. The norm of the gradients before clipping, on the device."""
    norm = engine.clip(parameters, max_grad_norm if max_grad_norm is not None else float("inf"))
    set_rate(optimizer, lr)
    with nullcontext() if takes_float32(optimizer) else narrowed(parameters):
        engine.step(optimizer)
    optimizer.zero_grad(set_to_none=True)
    return norm


def set_rate(optimizer: Optimizer, lr: float) -> None:
    """Give every group its learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)
