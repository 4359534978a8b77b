"""One optimizer step: forward and backward of its micro-batches, then the update. Traced by the planner."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from memtrain.trainers.data.collate import MicroBatch
from memtrain.trainers.method import Method
from memtrain.trainers.optim import clip_gradients


@dataclass(frozen=True, slots=True)
class Engine:
    """How a step reaches the other ranks. The default is one process with plain autograd."""

    num_ranks: int = 1
    backward: Callable[[Tensor], None] = torch.autograd.backward
    hold_sync: Callable[[nn.Module], AbstractContextManager[None]] = lambda model: nullcontext()
    """Context in which a backward pass does not exchange gradients: all micro-batches but the last."""
    clip: Callable[[Sequence[nn.Parameter], float], Tensor] = clip_gradients
    """Scales gradients down to a norm; the norm before, as a scalar on the device."""


def forward_backward(
    model: nn.Module,
    method: Method,
    micros: Iterable[MicroBatch],
    *,
    denominator: float,
    engine: Engine,
    num_micros: int,
    want_stats: bool,
    seed_micro: Callable[[int], None] = lambda index: None,
) -> dict[str, Tensor]:
    """Accumulate the gradients of one step; the sums of this rank, `loss` among them, on the device.

    Losses are divided by the denominator of the whole step, so their sum over micro-batches and ranks is the
    mean of one large batch. Engines average gradients over ranks: the loss is scaled up to undo that.
    No host synchronisation happens here.
    """
    totals: dict[str, Tensor] = {}
    for index, micro in enumerate(micros):
        seed_micro(index)
        is_last = index == num_micros - 1
        with nullcontext() if is_last else engine.hold_sync(model):
            loss = method.loss(model, micro, denominator=denominator, want_stats=want_stats)
            engine.backward(loss.value * engine.num_ranks if engine.num_ranks > 1 else loss.value)
        for name, value in {"loss": loss.value.detach(), **loss.sums}.items():
            totals[name] = totals[name] + value if name in totals else value
    return totals


def update(
    optimizer: Optimizer,
    parameters: Sequence[nn.Parameter],
    *,
    lr: float,
    max_grad_norm: float | None,
    engine: Engine,
) -> Tensor:
    """Clip, step, and free the gradients. The norm of the gradients before clipping, on the device."""
    norm = engine.clip(parameters, max_grad_norm if max_grad_norm is not None else float("inf"))
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm
