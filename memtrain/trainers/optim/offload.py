"""Optimizer states that wait in host memory: they travel to the device for the step, a bucket at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from memtrain.memory.estimate.static import OFFLOAD_BUCKET
from memtrain.trainers.optim.buckets import buckets_of, step_by_bucket
from memtrain.trainers.runtime.oom_errors import attempt

STATES = 2
"""Numbers of state of a weight at most: AdamW's two moments, in the dtype of what is stepped."""

HOST = "cpu"
"""Device on which states wait. A trace, in which the CPU plays the GPU, has another kind of tensor play the
host."""


class OffloadedStates(Optimizer):
    """An optimizer whose states are in host memory between its steps: pinned where the weights are on CUDA.

    The same kernels run on the same device, so the numbers are the same bits, and `state_dict` is that of the
    optimizer inside: runs with and without it continue each other. On a CPU the states are copied to and fro
    all the same.

    Source: Rajbhandari et al. 2021 (ZeRO-Infinity), arXiv:2104.07857, section 5.2.2 (states streamed through
    the device).
    """

    def __init__(self, inner: Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner
        self.param_groups = inner.param_groups
        self.state = inner.state

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # pyright: ignore
        """Step every tensor that has a gradient, bucket by bucket.

        When it breaks off, the gradients of buckets that are done are gone, and all others are there.
        """
        loss = closure() if closure is not None else None
        step_by_bucket(self._parameters(), _buckets, self._step_bucket)
        return loss

    def state_dict(self) -> dict[str, Any]:
        """State of the optimizer inside, its tensors in host memory."""
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue exactly where `state_dict` was taken; the states stay on the host."""
        self.inner.load_state_dict(state_dict | {"state": {}})
        self.param_groups, self.state = self.inner.param_groups, self.inner.state
        self.state.clear()
        indices = [index for group in state_dict["param_groups"] for index in group["params"]]
        for index, parameter in zip(indices, self._parameters(), strict=True):
            if index in state_dict["state"]:
                entry = state_dict["state"][index]
                self.state[parameter] = {name: to_host(value, parameter) for name, value in entry.items()}

    def _step_bucket(self, bucket: list[Tensor], gradients: dict[Tensor, Tensor]) -> None:
        waiting = {parameter: self.state.get(parameter, {}) for parameter in bucket}
        moved = {
            parameter: {name: to_device(value, parameter) for name, value in entry.items()}
            for parameter, entry in waiting.items()
            if entry
        }
        self.state.update(moved)
        for parameter in bucket:
            parameter.grad = gradients[parameter]
        versions = {parameter: parameter._version for parameter in bucket}
        try:
            self.inner.step()
        except BaseException:
            # A tensor that was written keeps its new states, on the device until its next step.
            for parameter in bucket:
                if parameter._version == versions[parameter]:
                    self.state[parameter] = waiting[parameter]
            raise
        finally:
            for parameter in bucket:
                parameter.grad = None
        for parameter in bucket:
            self._send_home(parameter, waiting[parameter])
        if bucket[0].device.type == "cuda":
            torch.cuda.current_stream(bucket[0].device).synchronize()

    def _send_home(self, parameter: Tensor, home: dict[str, Any]) -> None:
        """Put the states of a tensor back on the host; they stay where they are if that has no room."""
        entry = self.state[parameter].items()
        made, is_done = attempt(
            lambda: {name: to_host(value, parameter, home.get(name)) for name, value in entry}
        )
        if is_done:
            assert made is not None
            self.state[parameter] = made

    def _parameters(self) -> Iterator[Tensor]:
        for group in self.param_groups:
            yield from group["params"]


def _buckets(parameters: list[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors whose states are at most OFFLOAD_BUCKET bytes together, or one tensor alone."""
    return buckets_of(parameters, OFFLOAD_BUCKET, lambda parameter: STATES * parameter.nbytes)


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
