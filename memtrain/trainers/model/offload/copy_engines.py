"""Copy engines between the device and the host: on CUDA streams, at once, or as late as allowed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from memtrain.memory.plan.settings import Settings

Ticket = Any
"""A copy under way; None is a copy that is done."""


class CopyEngine(Protocol):
    """Starts copies and orders work after them. Copies in one direction run in the order they were started.

    A copy starts after all work that compute was given before, and after the copy `after`.
    """

    def allocate_host(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes] of host memory."""
        ...

    def allocate_device(self, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """[size] device memory to copy back into."""
        ...

    def copy_out(self, host: Tensor, device: Tensor, after: Ticket) -> Ticket:
        """Start copying from the device to the host."""
        ...

    def copy_back(self, device: Tensor, host: Tensor, after: Ticket) -> Ticket:
        """Start copying from the host to the device."""
        ...

    def wait(self, ticket: Ticket) -> None:
        """Compute goes on after this copy. The host need not wait."""
        ...

    def settle(self, ticket: Ticket) -> None:
        """The host goes on after this copy."""
        ...


class SyncEngine:
    """Copies at once. For a CPU, where both sides are the same memory and nothing is gained but the
    figures."""

    def allocate_host(self, num_bytes: int) -> Tensor:
        """Plain host memory."""
        return torch.empty(num_bytes, dtype=torch.uint8)

    def allocate_device(self, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Plain memory."""
        return torch.empty(size, dtype=dtype, device=device)

    def copy_out(self, host: Tensor, device: Tensor, after: Ticket) -> Ticket:
        """Done when this returns."""
        host.copy_(device)

    def copy_back(self, device: Tensor, host: Tensor, after: Ticket) -> Ticket:
        """Done when this returns."""
        device.copy_(host)

    def wait(self, ticket: Ticket) -> None:
        """Nothing to wait for."""

    def settle(self, ticket: Ticket) -> None:
        """Nothing to wait for."""


class CudaEngine:
    """Copies on a side stream for each direction, with pinned host memory and an event for each copy.

    Device memory goes back to the allocator only after compute was made to wait for its copy, so the
    allocator needs no `record_stream` and no guess at who still uses what.
    """

    def __init__(self) -> None:
        self._out = torch.cuda.Stream()
        self._back = torch.cuda.Stream()

    def allocate_host(self, num_bytes: int) -> Tensor:
        """Pinned host memory."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def allocate_device(self, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory of the compute stream."""
        return torch.empty(size, dtype=dtype, device=device)

    def copy_out(self, host: Tensor, device: Tensor, after: Ticket) -> Ticket:
        """Queued on the outward stream."""
        return self._copy(self._out, host, device, after)

    def copy_back(self, device: Tensor, host: Tensor, after: Ticket) -> Ticket:
        """Queued on the inward stream."""
        return self._copy(self._back, device, host, after)

    def wait(self, ticket: Ticket) -> None:
        """The current stream waits."""
        if ticket is not None:
            torch.cuda.current_stream().wait_event(ticket)

    def settle(self, ticket: Ticket) -> None:
        """The host waits."""
        if ticket is not None:
            ticket.synchronize()

    def _copy(self, stream: torch.cuda.Stream, target: Tensor, source: Tensor, after: Ticket) -> Ticket:
        # Compute must have made the source, and must be done with what lay in the target before.
        stream.wait_stream(torch.cuda.current_stream())
        if after is not None:
            stream.wait_event(after)
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record(stream)
        return event


class LazyEngine:
    """Copies nothing until somebody waits: a missing wait is a wrong number in a test, every time.

    On a GPU the same fault would be a rare race. New memory is full of a pattern that no run makes. Waiting
    for a copy runs those started before it in the same direction, as a stream would, and what it was told
    to follow.
    """

    def __init__(self) -> None:
        self._out: deque[_LazyCopy] = deque()
        self._back: deque[_LazyCopy] = deque()

    def allocate_host(self, num_bytes: int) -> Tensor:
        """Plain host memory."""
        return torch.full((num_bytes,), 0xA5, dtype=torch.uint8)

    def allocate_device(self, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Plain memory."""
        return torch.full((size * dtype.itemsize,), 0xA5, dtype=torch.uint8, device=device).view(dtype)

    def copy_out(self, host: Tensor, device: Tensor, after: Ticket) -> Ticket:
        """Queued."""
        return self._copy(self._out, lambda: host.copy_(device), after)

    def copy_back(self, device: Tensor, host: Tensor, after: Ticket) -> Ticket:
        """Queued."""
        return self._copy(self._back, lambda: device.copy_(host), after)

    def wait(self, ticket: Ticket) -> None:
        """Runs the queue up to this copy."""
        while ticket is not None and not ticket.is_done:
            first = ticket.queue.popleft()
            self.wait(first.after)
            first.run()
            first.is_done = True

    def settle(self, ticket: Ticket) -> None:
        """Wait, exactly as `wait` does."""
        self.wait(ticket)

    def _copy(self, queue: deque[_LazyCopy], run: Callable[[], Any], after: Ticket) -> Ticket:
        ticket = _LazyCopy(queue, run, after)
        queue.append(ticket)
        return ticket


class _LazyCopy:
    __slots__ = ("after", "is_done", "queue", "run")

    def __init__(self, queue: deque[_LazyCopy], run: Callable[[], Any], after: Ticket) -> None:
        self.queue = queue
        self.run = run
        self.after = after
        self.is_done = False


def engine_for(settings: Settings) -> CopyEngine:
    """The engine of the device of a run."""
    return CudaEngine() if settings.device == "cuda" else SyncEngine()
