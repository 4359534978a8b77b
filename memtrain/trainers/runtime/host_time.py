"""Host time of a step: the share in which no operator was at work, as Python had not asked for one yet."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import _get_current_dispatch_mode

SETTLED_STEPS = 3
"""Steps before the one that is looked at: the first ones allocate, and are watched on a CPU. Taste."""

Span = tuple[int, int]
"""Start and end in nanoseconds."""


@dataclass(slots=True)
class HostTime:
    """A single step of a run under torch's profiler; every other step is left alone.

    On a GPU: the share of the step in which no kernel and no copy ran, though the step was under way. On a
    CPU, where operators run as they are asked for: the share outside of them.
    """

    device: torch.device
    note: Callable[[float, float], None]
    """Takes (share, seconds of the step)."""
    is_on: bool = True
    _steps: int = field(default=0, init=False)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Watch the enclosed work if it is the step's turn, until the device has done its work."""
        self._steps += 1
        # A mode that sees every operator slows the host: such a step tells nothing of others.
        if not self.is_on or self._steps <= SETTLED_STEPS or _get_current_dispatch_mode() is not None:
            yield
            return
        self.is_on = False
        # torch's profiler announces its start and end on the screen at lower levels.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        on_gpu = self.device.type == "cuda"
        with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as seen:
            started = time.perf_counter()
            yield
            seconds = time.perf_counter() - started
        spans = list(_spans(seen, DeviceType.CUDA if on_gpu else DeviceType.CPU))
        # Without a single span the profiler saw nothing (a driver that does not let it), and nothing is told.
        if spans:
            self.note(max(0.0, 1.0 - covered(spans) / 1e9 / seconds), seconds)


def _spans(seen: profile, kind: DeviceType) -> Iterator[Span]:
    profiler = seen.profiler
    assert profiler is not None, "The profiler is there once it has run."
    results = profiler.kineto_results
    for event in results.events() if results is not None else ():
        # A named part of the program lies over all that it started, and over the pauses between.
        is_work = (
            not event.is_user_annotation() if kind == DeviceType.CUDA else event.name().startswith("aten::")
        )
        if event.device_type() == kind and is_work:
            yield event.start_ns(), event.start_ns() + event.duration_ns()


def covered(spans: Iterable[Span]) -> int:
    """Nanoseconds that lie in any of the spans, each counted once."""
    total, reached = 0, 0
    for start, end in sorted(spans):
        total += max(0, end - max(start, reached))
        reached = max(reached, end)
    return total
