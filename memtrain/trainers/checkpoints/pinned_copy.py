"""Copies of states in host memory, which a thread can write while the run changes the states themselves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

State = Any
"""State as in state_io.py."""

STAGE_BYTES = 64 * 2**20
"""Pinned memory of each of the two stages that a copy from CUDA passes through. Taste: large copies reach the
bus's rate, and pinned memory is not swapped."""


class HostCopies:
    """Host buffers that hold one state after the other: made for the first, and used again for the next.

    States have the same tensors in the same order each time; a buffer that does not fit is made anew. Memory
    is that of one state, from the first copy on.
    """

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []
        self._next = 0
        self._stages: list[Tensor] = []

    def begin(self) -> None:
        """Begin a new copy: nothing that was copied before is read any more, and its buffers may be
        written."""
        self._next = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.nbytes for buffer in self._buffers)

    @torch.no_grad()
    def tensor(self, tensor: Tensor) -> Tensor:
        """A contiguous copy in host memory."""
        place, self._next = self._next, self._next + 1
        if place == len(self._buffers):
            self._buffers.append(torch.empty(0, dtype=tensor.dtype))
        buffer = self._buffers[place]
        if buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = self._buffers[place] = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        if tensor.device.type == "cuda":
            self._through_stage(tensor.detach().contiguous(), buffer)
        else:
            buffer.copy_(tensor)
        return buffer

    def state(self, state: State) -> State:
        """A copy of a whole state: containers anew, tensors in buffers, arrays copied, values as they are."""
        if isinstance(state, Tensor):
            return self.tensor(state)
        if isinstance(state, np.ndarray):
            return state.copy()
        if isinstance(state, Mapping):
            return {key: self.state(item) for key, item in state.items()}
        if isinstance(state, list):
            return [self.state(item) for item in state]
        if isinstance(state, tuple):
            return tuple(self.state(item) for item in state)
        return state

    def _through_stage(self, source: Tensor, target: Tensor) -> None:
        """Copy from the device through pinned memory: a piece travels while the one before is put away."""
        if not self._stages:
            self._stages = [torch.empty(STAGE_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        from_bytes, to_bytes = (one.reshape(-1).view(torch.uint8) for one in (source, target))
        stream = torch.cuda.current_stream(source.device)
        under_way: Callable[[], None] = lambda: None  # noqa: E731
        for number, start in enumerate(range(0, from_bytes.numel(), STAGE_BYTES)):
            piece = from_bytes[start : start + STAGE_BYTES]
            staged = self._stages[number % 2][: piece.numel()]
            staged.copy_(piece, non_blocking=True)
            under_way()
            home = to_bytes[start : start + piece.numel()]
            under_way = partial(_put_away, stream.record_event(), staged, home)
        under_way()


def _put_away(arrived: torch.Event, staged: Tensor, home: Tensor) -> None:
    """Copy a piece out of pinned memory once it is there."""
    arrived.synchronize()
    home.copy_(staged)
