"""The optimizer step, whole or not at all: memory that runs out in the middle of it is no half step.

What makes it so. AdamW and SGD make the states of a group before they write any of it, and their fused
kernels allocate nothing: a group is stepped wholly or not at all. (Versions would not tell: the fused kernels
do not count what they write.) Adafactor and Muon go tensor by tensor in the same way, and a tensor's version
says that it was written. Float32 copies and offloaded states go bucket by bucket, and take away the gradients
of the buckets that are done when they break off.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

import torch
from torch import Tensor
from torch.optim import Optimizer

from memtrain.errors import OutOfMemory
from memtrain.trainers.optim.master_weights import MasterWeights
from memtrain.trainers.runtime.oom_errors import attempt, free

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
