"""The update of an optimizer step, and the engine by which it reaches the other ranks and the weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from memtrain.trainers.optim.atomic_step import step_whole
from memtrain.trainers.optim.build import clip_gradients, takes_float32
from memtrain.trainers.optim.wide_sums import narrowed, sum_wide


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
