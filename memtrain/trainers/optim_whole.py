"""The optimizer step, whole or not at all: memory that runs out in the middle of it is no half step.

What makes it so: fused kernels (AdamW, SGD) allocate nothing once their states are there; Adafactor, Muon and
the float32 copies allocate what a tensor needs before they write any of it. So a tensor is stepped wholly or
not at all, its version counter tells which, and the step is made again for those that were not.
"""

from __future__ import annotations

from torch import Tensor
from torch.optim import Optimizer

from memtrain.errors import OutOfMemory
from memtrain.trainers.memory_errors import attempt, free
from memtrain.trainers.optim_master import MasterWeights

ATTEMPTS = 3
"""A second attempt frees the gradients of what was stepped and the allocator's blocks; a third, in case the
memory was another process's. Taste."""


def step_whole(optimizer: Optimizer) -> None:
    """One optimizer step. Gradients of tensors that were stepped are freed where memory ran out.

    Raises: OutOfMemory when memory runs out again and again: some weights are then a step ahead of others.
    """
    pairs = stepped_pairs(optimizer)
    for _ in range(ATTEMPTS - 1):
        versions = [leaf._version for _, leaf in pairs]
        had_state = set(optimizer.state)
        if _try(optimizer):
            return
        for (parameter, leaf), version in zip(pairs, versions, strict=True):
            if leaf._version != version:
                parameter.grad = None
            elif leaf not in had_state:
                optimizer.state.pop(leaf, None)
        free()
    if not _try(optimizer):
        raise OutOfMemory(
            "memory ran out in the optimizer step, between two weights",
            fix="set memory.optimizer_offload: on or optim.kind: adafactor, and run the same command again: "
            "it goes on from the last checkpoint",
        )


def stepped_pairs(optimizer: Optimizer) -> list[tuple[Tensor, Tensor]]:
    """(parameter, what the optimizer itself steps): the same but for float32 copies."""
    if isinstance(optimizer, MasterWeights):
        return list(optimizer.pairs())
    return [(parameter, parameter) for group in optimizer.param_groups for parameter in group["params"]]


def _try(optimizer: Optimizer) -> bool:
    return attempt(optimizer.step)[1]
