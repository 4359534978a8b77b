"""Optimizer states that wait in host memory: they travel to the device for the step, a bucket at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from memtrain.memory.estimate.static import OFFLOAD_BUCKET
from memtrain.trainers.optim.bucketed import BucketedOptimizer, Entry
from memtrain.trainers.optim.buckets import buckets_of

STATES = 2
"""Numbers of state of a weight at most: AdamW's two moments, in the dtype of the stepped weights."""

HOST = "cpu"
"""Device on which states wait. A trace, in which the CPU plays the GPU, has another kind of tensor play the
host."""


class OffloadedStates(BucketedOptimizer):
    """An optimizer whose states are in host memory between its steps: pinned where the weights are on CUDA.

    The same kernels run on the same device, so the numbers are the same bits, and `state_dict` is that of the
    optimizer inside: runs with and without it continue each other. On a CPU the states are copied to and fro
    all the same.

    Source: Rajbhandari et al. 2021 (ZeRO-Infinity), arXiv:2104.07857, section 5.2.2 (states streamed through
    the device).
    """

    def buckets(self, parameters: list[Tensor]) -> Iterator[list[Tensor]]:
        """Tensors whose states are at most OFFLOAD_BUCKET bytes together, or one tensor alone."""
        return buckets_of(parameters, OFFLOAD_BUCKET, lambda parameter: STATES * parameter.nbytes)

    def taken_out(self, entry: Entry, parameter: Tensor) -> Entry:
        """Copies beside the weight."""
        return {name: to_device(value, parameter) for name, value in entry.items()}

    def put_back(self, entry: Entry, parameter: Tensor, before: Entry) -> Entry:
        """Copies on the host."""
        return {name: to_host(value, parameter, before.get(name)) for name, value in entry.items()}

    def loaded(self, entry: Entry, parameter: Tensor) -> Entry:
        """Copies on the host."""
        return {name: to_host(value, parameter) for name, value in entry.items()}

    def _step_bucket(self, bucket: list[Tensor], gradients: dict[Tensor, Tensor]) -> None:
        super()._step_bucket(bucket, gradients)
        if bucket[0].device.type == "cuda":
            torch.cuda.current_stream(bucket[0].device).synchronize()


def to_device(value: Any, parameter: Tensor) -> Any:
    """A copy beside the weight; plain values are themselves."""
    if not isinstance(value, Tensor):
        return value
    made = torch.empty_like(value, device=parameter.device)
    return made.copy_(value, non_blocking=True)


def to_host(value: Any, parameter: Tensor, home: Any = None) -> Any:
    """A copy in host memory, in `home` where there is one of its shape; plain values are themselves."""
    if not isinstance(value, Tensor):
        return value
    if not isinstance(home, Tensor) or home.shape != value.shape or home.dtype != value.dtype:
        home = torch.empty_like(value, device=HOST, pin_memory=parameter.device.type == "cuda")
    return home.copy_(value, non_blocking=True)
