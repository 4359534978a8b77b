"""Copy engines between the device and the host: on CUDA streams, at once, or as late as allowed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from memtrain.memory.plan.settings import Settings
from memtrain.trainers.runtime.device_waits import HostSide, host_acts, host_side

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
        self._captured: dict[torch.cuda.Stream, HostSide] = {}
        """The capture that a stream has last taken part in."""

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
        if ticket is not None and ticket.side is host_side():
            torch.cuda.current_stream().wait_event(ticket.event)

    def settle(self, ticket: Ticket) -> None:
        """The host waits."""
        if ticket is not None:
            host_acts("it waits for a copy")
            if ticket.side is None:
                ticket.event.synchronize()

    def _copy(self, stream: torch.cuda.Stream, target: Tensor, source: Tensor, after: Ticket) -> Ticket:
        # Compute must have made the source, and must be done with what lay in the target before.
        stream.wait_stream(torch.cuda.current_stream())
        side = host_side()
        if side is not None and self._captured.get(stream) is not side:
            self._join(stream, side)
        # Copies of a capture are over with it, and those before it are waited for where it is replayed.
        if after is not None and after.side is side:
            stream.wait_event(after.event)
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record(stream)
        return CudaTicket(event, side)

    def _join(self, stream: torch.cuda.Stream, side: HostSide) -> None:
        """A capture ends with all that was started in it, and is replayed after what was started before."""
        self._captured[stream] = side
        wait = partial(_wait_for, stream)
        side.before_end.append(wait)
        side.before_replay.append(wait)


def _wait_for(stream: torch.cuda.Stream) -> None:
    torch.cuda.current_stream().wait_stream(stream)


class CudaTicket(NamedTuple):
    """A copy under way on a side stream."""

    event: torch.cuda.Event
    side: HostSide | None
    """The capture that it is part of; None: it runs as it was started."""


class LazyEngine:
    """Copies nothing until somebody waits: a missing wait is a wrong number in a test, every time.

    On a GPU the same fault would be a rare race. New memory is full of a pattern that no run makes. Waiting
    for a copy runs those started before it in the same direction, as a stream would, and what it was told
    to follow.
    """

    def __init__(self) -> None:
        self._out: deque[_LazyCopy] = deque()
        self._back: deque[_LazyCopy] = deque()
        self._joined: HostSide | None = None

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
        side = host_side()
        if side is not None and self._joined is not side:
            # As streams join at the end of a capture, and before a replay.
            self._joined = side
            side.before_end.append(self._run_all)
            side.before_replay.append(self._run_all)
        ticket = _LazyCopy(queue, run, after)
        queue.append(ticket)
        return ticket

    def _run_all(self) -> None:
        for queue in (self._out, self._back):
            if queue:
                self.wait(queue[-1])


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
