"""The update of an optimizer step, and the engine by which it reaches the other ranks and the weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from memtrain.errors import OutOfMemory
from memtrain.recipes.sections.optim import Optim
from memtrain.trainers.optim.master_weights import MasterWeights
from memtrain.trainers.optim.zero_optimizer import ZeroOptimizer
from memtrain.trainers.runtime.oom_errors import attempt, free

# The optimizer step, whole or not at all: memory that runs out in the middle of it is no half step.
#
# What makes it so. AdamW and SGD make the states of a group before they write any of it, and their fused
# kernels allocate nothing: a group is stepped wholly or not at all. (Versions would not tell: the fused
# kernels do not count what they write.) Adafactor and Muon go tensor by tensor in the same way, and the
# version of a tensor says that it was written. Float32 copies and offloaded states go bucket by bucket, and
# take away the gradients of the buckets that are done when they break off.


ATTEMPTS = 3
"""A second attempt frees the stepped weights' gradients and the allocator's blocks; a third, in case the
memory was another process's. Taste."""

Gradients = list[tuple[Tensor, Tensor]]
"""Parameters with their gradients."""


def step_whole(optimizer: Optimizer) -> None:
    """Make an optimizer step, group by group; the gradients of a group are freed when it is done.

    Raises: OutOfMemory when memory runs out again and again: some weights are then a step ahead of others.
    """
    groups: list[Gradients] = [
        [(parameter, parameter.grad) for parameter in group["params"] if parameter.grad is not None]
        for group in optimizer.param_groups
    ]
    _take_away(chain(*groups))
    if _allocates_nothing(optimizer):
        # All at once: a call for each group is 0.2 ms of host time.
        groups = [list(chain(*groups))]
    while groups:
        _step_group(optimizer, groups.pop(0))


def _step_group(optimizer: Optimizer, gradients: Gradients) -> None:
    leaves = dict(optimizer.pairs()) if isinstance(optimizer, MasterWeights) else {}
    for _ in range(ATTEMPTS):
        if not gradients:
            return
        for parameter, gradient in gradients:
            parameter.grad = gradient
        versions = [parameter._version for parameter, _ in gradients]
        # Tensors by their places in memory: to hash one is a call of Python for each weight.
        had_state = {id(one) for one in optimizer.state}
        _, is_done = attempt(optimizer.step)
        left = [
            one
            for one, version in zip(gradients, versions, strict=True)
            if not is_done and one[0].grad is not None and one[0]._version == version
        ]
        _take_away(gradients)
        gradients = left
        if is_done:
            return
        for leaf in (leaves.get(parameter, parameter) for parameter, _ in left):
            if id(leaf) not in had_state:
                optimizer.state.pop(leaf, None)
        free()
    raise OutOfMemory(
        "out of memory in the optimizer step, between two weights",
        "optim",
        fix="set memory.optimizer_offload: on or optim.kind: adafactor, and run the same command again: "
        "it resumes from the last checkpoint",
    )


def _allocates_nothing(optimizer: Optimizer) -> bool:
    """Whether the fused kernel has the states of all weights, so that memory cannot run out any more."""
    is_fused = type(optimizer) is torch.optim.AdamW and bool(optimizer.defaults["fused"])
    return is_fused and len(optimizer.state) == sum(len(group["params"]) for group in optimizer.param_groups)


def _take_away(gradients: Iterable[tuple[Tensor, Tensor]]) -> None:
    for parameter, _ in gradients:
        parameter.grad = None


# The learning rate of every step, as a pure function of its number.


DEFAULT_WARMUP_RATIO = 0.03
"""Taste: the value of Alpaca's recipe, which most later ones kept."""

WSD_DECAY_RATIO = 0.2
"""Share of all steps in which `wsd` falls. Source: Haegele et al. 2024, arXiv:2405.18392, section 4."""


def lr_at(step: int, *, optim: Optim, max_steps: int) -> float:
    """Learning rate of optimizer step `step`, counted from 0, of a run of `max_steps`.

    With w warm-up steps, m = `min_lr_ratio`, N = `max_steps` and p = (step - w) / (N - w):

        step < w    lr * (step + 1) / w
        constant    lr
        linear      lr * (m + (1 - m) * (1 - p))
        cosine      lr * (m + (1 - m) * (1 + cos(pi * p)) / 2)
        wsd         lr until N - d, then lr * (m + (1 - m) * (N - step) / d), with d = ceil(0.2 * N)

    Warm-up ends on the full rate and its first step is not 0, unlike transformers' (step / w); without
    warm-up the values are transformers' own.

    Source: cosine: Loshchilov & Hutter 2016, arXiv:1608.03983, eq. 5; wsd: Hu et al. 2024, arXiv:2404.06395,
    section 4.2, with the linear fall of arXiv:2405.18392.
    """
    warmup = warmup_steps(optim, max_steps)
    if step < warmup:
        return optim.lr * (step + 1) / warmup
    done = min(1.0, (step - warmup) / max(1, max_steps - warmup))
    falls = {"constant": 1.0, "linear": 1.0 - done, "cosine": (1.0 + math.cos(math.pi * done)) / 2}
    if optim.schedule == "wsd":
        decay = max(1, math.ceil(WSD_DECAY_RATIO * max_steps))
        part = max(0.0, min(1.0, (max_steps - step) / decay))
    else:
        part = falls[optim.schedule]
    floor = 0.0 if optim.schedule == "constant" else optim.min_lr_ratio
    return optim.lr * (floor + (1.0 - floor) * part)


def warmup_steps(optim: Optim, max_steps: int) -> int:
    """Steps of warm-up: as given, or the ratio of all steps rounded up; never more than there are steps."""
    if optim.warmup_steps is not None:
        return min(optim.warmup_steps, max_steps)
    ratio = optim.warmup_ratio if optim.warmup_ratio is not None else DEFAULT_WARMUP_RATIO
    return min(math.ceil(ratio * max_steps), max_steps)


# Gradients of half-precision weights, summed in float32 over micro-batches and ranks.
#
# A bfloat16 sum of k like terms loses every term that is below half a step of it: with 2,048 micro-batches
# half of the gradient. torch casts each incoming gradient to a weight's `grad_dtype` and adds it there: in
# float32 the sum is exact to 1e-6, for 2 bytes a weight more than one gradient in bfloat16.


HALF = (torch.bfloat16, torch.float16)


def sum_wide(model: nn.Module, num_micro_batches: int) -> None:
    """From now on gradients of `model` are summed in float32 where a step has several micro-batches.

    A gradient that is alone stays as the backward pass makes it. Called when there are no gradients.
    """
    set_wide(model.parameters(), is_wide=num_micro_batches > 1)


def summing_wide(parameters: Iterable[nn.Parameter]) -> Callable[[nn.Module, int], None]:
    """`sum_wide` of a model whose trained parameters are these: no module is gone through at each step."""
    halves = [one for one in parameters if one.dtype in HALF]
    return lambda model, num_micro_batches: set_wide(halves, is_wide=num_micro_batches > 1)


def set_wide(parameters: Iterable[Tensor], *, is_wide: bool) -> None:
    """Whether half-precision parameters that are trained get float32 gradients."""
    for parameter in parameters:
        if parameter.requires_grad and parameter.dtype in HALF:
            wanted = torch.float32 if is_wide else parameter.dtype
            if parameter.grad_dtype is not wanted:
                parameter.grad_dtype = wanted


@contextmanager
def narrowed(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Gradients are in their weights' own precision inside, rounded once; they are gone afterwards.

    For optimizers that step half-precision weights as they are.
    """
    wide = [one for one in parameters if one.grad is not None and one.grad.dtype != one.dtype]
    for parameter in wide:
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None, "Only parameters with a gradient are taken."
        parameter.grad_dtype = parameter.dtype
        parameter.grad = gradient.to(parameter.dtype)
        del gradient
    try:
        yield
    finally:
        for parameter in wide:
            parameter.grad = None
            parameter.grad_dtype = torch.float32


def clip_gradients(parameters: Sequence[nn.Parameter], max_norm: float) -> Tensor:
    """Scale all gradients so that their norm is at most `max_norm`; the norm before, fp32, on the device.

    The norm is summed in fp32 whatever the gradients' dtype, and nothing waits for the device. An infinite
    `max_norm` scales nothing. A norm that is not finite makes every gradient NaN: look at it before the step.

    Source: Pascanu et al. 2013, arXiv:1211.5063, algorithm 1, over all parameters together.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        return torch.zeros(())
    norms = _norms(gradients)
    norm = torch.linalg.vector_norm(torch.stack(norms))
    if max_norm != float("inf"):
        devices = {gradient.device.type for gradient in gradients}
        # A traced host's tensors have no data, and no foreach kernels.
        is_one = len(devices) == 1 and devices != {"meta"}
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm, foreach=is_one or None)
    return norm


def _norms(gradients: list[Tensor]) -> list[Tensor]:
    """The norm of each, in order, on the device of the first, where offloaded weights' norms go too."""
    devices = {gradient.device for gradient in gradients}
    if len(devices) == 1:
        return list(torch._foreach_norm(gradients, 2, torch.float32))
    own = {device: [one for one in gradients if one.device == device] for device in devices}
    norms = {device: iter(torch._foreach_norm(those, 2, torch.float32)) for device, those in own.items()}
    return [next(norms[one.device]).to(gradients[0].device) for one in gradients]


def takes_float32(optimizer: Optimizer) -> bool:
    """Whether an optimizer takes float32 gradients of half-precision weights."""
    return isinstance(optimizer, MasterWeights | ZeroOptimizer)


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
