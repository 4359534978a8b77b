"""Optimizer states that wait in host memory: they travel to the device for the step, a bucket at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from memtrain.memory.plan.sizes import OFFLOAD_BUCKET
from memtrain.trainers.model.offload.copy_engines import CopyEngine, CudaEngine, SyncEngine, Ticket
from memtrain.trainers.optim.bucketed import BucketedOptimizer, Entry
from memtrain.trainers.optim.buckets import buckets_of
from memtrain.trainers.runtime.oom_errors import attempt

STATES = 2
"""Numbers of state of a weight at most: AdamW's two moments, in the dtype of the stepped weights."""

HOST = "cpu"
"""Device on which states wait. A trace, in which the CPU plays the GPU, has another kind of tensor play the
host."""


class Shuttle:
    """Copies of host tensors on the device, for a bucket and the one after it, and their way back.

    On CUDA on a stream for each direction: while a bucket is stepped, the next one comes and the one before
    leaves. Elsewhere the same calls copy at once.
    """

    def __init__(self, engine: CopyEngine | None = None) -> None:
        self._engine = engine
        self._coming: dict[int, tuple[Tensor, Tensor, Ticket]] = {}
        """By the host tensor's id: itself, its copy, and the copy's ticket."""
        self._leaving: list[tuple[Tensor, Ticket]] = []

    def fetch(self, values: Iterable[Any], parameter: Tensor) -> None:
        """Begin to copy tensors beside a weight, those that are not on their way yet."""
        for value in values:
            if isinstance(value, Tensor) and id(value) not in self._coming:
                copy = device_memory(value, parameter)
                self._coming[id(value)] = (value, copy, self._on(parameter).copy_back(copy, value, None))

    def fetch_if_there_is_room(self, values: Sequence[tuple[Iterable[Any], Tensor]]) -> None:
        """Begin the copies of the next bucket; where memory does not allow them all, none comes."""
        before = set(self._coming)
        _, is_done = attempt(lambda: [self.fetch(held, parameter) for held, parameter in values])
        if not is_done:
            for key in self._coming.keys() - before:
                self._arrived(key)

    def take(self, value: Any, parameter: Tensor) -> Any:
        """A copy beside the weight, which the work after this may read; plain values are themselves."""
        if not isinstance(value, Tensor):
            return value
        self.fetch([value], parameter)
        return self._arrived(id(value))

    def send(self, value: Any, parameter: Tensor, home: Any = None) -> Any:
        """A copy in host memory, in `home` where it fits, that is there once `settle` was called."""
        if not isinstance(value, Tensor):
            return value
        home = host_memory(value, parameter, home)
        # Its memory is held until it has left, also where the tensor is given other data meanwhile.
        leaving = value.detach()
        self._leaving.append((leaving, self._on(parameter).copy_out(home, leaving, None)))
        return home

    def settle(self) -> None:
        """Wait until everything that was sent is on the host."""
        for _, ticket in self._leaving:
            self._engine_at_hand.settle(ticket)
        self._leaving.clear()

    def end(self) -> None:
        """The end of a step: all that was sent is on the host, and what came in vain is forgotten."""
        self.settle()
        for key in list(self._coming):
            self._arrived(key)

    def _arrived(self, key: int) -> Tensor:
        """Take a copy out of the list, after making later work wait for it: its memory may be used again."""
        _, copy, ticket = self._coming.pop(key)
        self._engine_at_hand.wait(ticket)
        return copy

    def _on(self, parameter: Tensor) -> CopyEngine:
        if self._engine is None:
            self._engine = CudaEngine() if parameter.device.type == "cuda" else SyncEngine()
        return self._engine

    @property
    def _engine_at_hand(self) -> CopyEngine:
        assert self._engine is not None, "Something was copied."
        return self._engine


class OffloadedStates(BucketedOptimizer):
    """An optimizer whose states are in host memory between its steps: pinned where the weights are on CUDA.

    The same kernels run on the same device, so the numbers are the same bits, and `state_dict` is that of the
    optimizer inside: runs with and without it continue each other. On a CPU the states are copied to and fro
    all the same. Two buckets are on the device at once: one is stepped, and another comes or leaves.

    Source: Rajbhandari et al. 2021 (ZeRO-Infinity), arXiv:2104.07857, section 5.2.2 (states streamed through
    the device).
    """

    def __init__(self, inner: Optimizer) -> None:
        super().__init__(inner)
        self.shuttle = Shuttle()
        self.coming: Sequence[Tensor] = ()
        """Parameters of the call after the next call of `step`, where they are known."""
        self._next_bucket: Sequence[Tensor] = ()

    def step(self, closure: Any = None) -> float | None:  # pyright: ignore
        """Step every tensor that has a gradient, bucket by bucket; see the base class."""
        try:
            return super().step(closure)
        except BaseException:
            self.coming = ()
            raise
        finally:
            if not self.coming:
                self.shuttle.end()

    def buckets(self, parameters: list[Tensor]) -> Iterator[list[Tensor]]:
        """Tensors whose states are at most OFFLOAD_BUCKET bytes together, or one tensor alone."""
        made, after = self._in_buckets(parameters), self._in_buckets(self.coming)[:1]
        for bucket, self._next_bucket in zip(made, [*made[1:], *(after or [[]])], strict=False):
            yield bucket

    def _in_buckets(self, parameters: Iterable[Tensor]) -> list[list[Tensor]]:
        return list(buckets_of(parameters, OFFLOAD_BUCKET, lambda parameter: STATES * parameter.nbytes))

    def taken_out(self, entry: Entry, parameter: Tensor) -> Entry:
        """Copies beside the weight."""
        return {name: self.shuttle.take(value, parameter) for name, value in entry.items()}

    def put_back(self, entry: Entry, parameter: Tensor, before: Entry) -> Entry:
        """Copies on the host."""
        return {name: self.shuttle.send(value, parameter, before.get(name)) for name, value in entry.items()}

    def loaded(self, entry: Entry, parameter: Tensor) -> Entry:
        """Copies on the host."""
        return {name: to_host(value, parameter) for name, value in entry.items()}

    def _step_bucket(self, bucket: list[Tensor], gradients: dict[Tensor, Tensor]) -> None:
        # The bucket before has left, so that there are never three.
        self.shuttle.settle()
        for parameter in bucket:
            self.shuttle.fetch(self._states(parameter), parameter)
        self.shuttle.fetch_if_there_is_room([(self._states(one), one) for one in self._next_bucket])
        super()._step_bucket(bucket, gradients)

    def _states(self, parameter: Tensor) -> list[Any]:
        return list(self.state.get(parameter, {}).values())


def device_memory(value: Tensor, parameter: Tensor) -> Tensor:
    """Memory for a copy beside the weight."""
    return torch.empty_like(value, device=parameter.device)


def to_host(value: Any, parameter: Tensor) -> Any:
    """A copy on the host, which is there once the device has done its work; plain values are themselves."""
    if not isinstance(value, Tensor):
        return value
    return host_memory(value, parameter).copy_(value, non_blocking=True)


def host_memory(value: Tensor, parameter: Tensor, home: Any = None) -> Tensor:
    """`home` where a tensor like `value` fits into it, or host memory for one, pinned beside CUDA."""
    if isinstance(home, Tensor) and home.shape == value.shape and home.dtype == value.dtype:
        return home
    return torch.empty_like(value, device=HOST, pin_memory=parameter.device.type == "cuda")
