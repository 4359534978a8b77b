"""The optimizer step, whole or not at all: memory that runs out in the middle of it is no half step.

What makes it so. AdamW and SGD make the states of a group before they write any of it, and their fused
kernels allocate nothing: a group is stepped wholly or not at all. (Versions would not tell: the fused kernels
do not count what they write.) Adafactor and Muon go tensor by tensor in the same way, and a tensor's version
says that it was written. Float32 copies and offloaded states go bucket by bucket, and take away the gradients
of the buckets that are done when they break off.
"""

from __future__ import annotations

from torch import Tensor
from torch.optim import Optimizer

from memtrain.errors import OutOfMemory
from memtrain.trainers.optim.master_weights import MasterWeights
from memtrain.trainers.runtime.oom_errors import attempt, free

ATTEMPTS = 3
"""A second attempt frees the stepped weights' gradients and the allocator's blocks; a third, in case the
memory was another process's. Taste."""


def step_whole(optimizer: Optimizer) -> None:
    """Make an optimizer step, group by group; the gradients of a group are freed when it is done.

    Raises: OutOfMemory when memory runs out again and again: some weights are then a step ahead of others.
    """
    groups: list[dict[Tensor, Tensor]] = [
        {parameter: parameter.grad for parameter in group["params"] if parameter.grad is not None}
        for group in optimizer.param_groups
    ]
    for parameter in (one for gradients in groups for one in gradients):
        parameter.grad = None
    while groups:
        _step_group(optimizer, groups.pop(0))


def _step_group(optimizer: Optimizer, gradients: dict[Tensor, Tensor]) -> None:
    leaves = dict(optimizer.pairs()) if isinstance(optimizer, MasterWeights) else {}
    for _ in range(ATTEMPTS):
        if not gradients:
            return
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
        versions = {parameter: parameter._version for parameter in gradients}
        had_state = set(optimizer.state)
        _, is_done = attempt(optimizer.step)
        left = {
            parameter: gradient
            for parameter, gradient in gradients.items()
            if not is_done and parameter.grad is not None and parameter._version == versions[parameter]
        }
        for parameter in gradients:
            parameter.grad = None
        gradients = left
        if is_done:
            return
        for leaf in (leaves.get(parameter, parameter) for parameter in left):
            if leaf not in had_state:
                optimizer.state.pop(leaf, None)
        free()
    raise OutOfMemory(
        "out of memory in the optimizer step, between two weights",
        "optim",
        fix="set memory.optimizer_offload: on or optim.kind: adafactor, and run the same command again: "
        "it resumes from the last checkpoint",
    )
