"""Host time of a step: the share in which no operator was at work, as Python had not asked for one yet.

Of a step of many micro-batches, the last one and the update are looked at: the profiler keeps a record of
every operator in host memory, 180 MiB for 15 micro-batches of a tiny model.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import _get_current_dispatch_mode

SETTLED_STEPS = 3
"""Steps before the one that is looked at: the first ones allocate, and are watched on a CPU. Taste."""
SETTLED_CPU_S = 5.0
"""Seconds of steps on a CPU before it: a look takes some 25 ms there, which is half a percent of these. The
steps of a GPU are looked at as soon as they are settled, for whether the host keeps up is told early."""

Span = tuple[int, int]
"""Start and end in nanoseconds."""


@dataclass(slots=True)
class HostTime:
    """The end of a single step of a run under torch's profiler; every other step is left alone.

    On a GPU: the share of the step in which no kernel and no copy ran, though the step was under way. On a
    CPU, where operators run as they are asked for: the share outside of them.
    """

    device: torch.device
    note: Callable[[float, float, int], None]
    """Takes (share, seconds that were looked at, micro-batches of the step)."""
    is_on: bool = True
    settled_cpu_s: float = SETTLED_CPU_S
    _steps: int = field(default=0, init=False)
    _steps_s: float = field(default=0.0, init=False)
    _is_its_turn: bool = field(default=False, init=False)
    _seen: profile | None = field(default=None, init=False)
    _started: float = field(default=0.0, init=False)
    _num_parts: int = field(default=0, init=False)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Watch the enclosed work from `last_part` on if it is the step's turn, until the device has done its
        work."""
        self._steps += 1
        began = time.perf_counter()
        # A mode that sees every operator slows the host: such a step tells nothing of others.
        is_settled = self.is_on and self._is_settled()
        self._is_its_turn = is_settled and _get_current_dispatch_mode() is None
        try:
            yield
            seconds = time.perf_counter() - self._started
        except BaseException:
            self._stopped()
            raise
        finally:
            self._is_its_turn = False
            self._steps_s += time.perf_counter() - began
        if (seen := self._stopped()) is None:
            return
        self.is_on = False
        spans = list(_spans(seen, DeviceType.CUDA if self._is_on_gpu else DeviceType.CPU))
        # Without a single span the profiler saw nothing (a driver that does not let it), and nothing is told.
        if spans:
            self.note(max(0.0, 1.0 - covered(spans) / 1e9 / seconds), seconds, self._num_parts)

    def last_part(self, num_parts: int) -> None:
        """Say that the last micro-batch of `num_parts` begins; once more where it is tried again."""
        if not self._is_its_turn:
            return
        self._stopped()
        # torch's profiler announces its start and end on the screen at lower levels.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        if self._is_on_gpu:
            # Kernels of the micro-batches before would be at work, and not seen.
            torch.cuda.synchronize(self.device)
        self._num_parts = num_parts
        kind = ProfilerActivity.CUDA if self._is_on_gpu else ProfilerActivity.CPU
        self._seen = profile(activities=[kind])
        # torch 2.11 warns that events are of one cycle, which this is; to keep them over several it makes a
        # Python object of each, which takes longer than the step.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._seen.start()
        self._started = time.perf_counter()

    def _is_settled(self) -> bool:
        """Whether enough steps were made before this one."""
        if self._steps <= SETTLED_STEPS:
            return False
        return self._is_on_gpu or self._steps_s >= self.settled_cpu_s

    @property
    def _is_on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def _stopped(self) -> profile | None:
        """The profiler, stopped, if it ran."""
        seen, self._seen = self._seen, None
        if seen is not None:
            seen.stop()
        return seen


def _spans(seen: profile, kind: DeviceType) -> Iterator[Span]:
    profiler = seen.profiler
    assert profiler is not None, "The profiler is there once it has run."
    results = profiler.kineto_results
    for event in results.events() if results is not None else ():
        if kind == DeviceType.CPU:
            is_work = event.name().startswith("aten::")
        else:
            # A named part of the program lies over all that it started, and over the pauses between.
            is_work = event.device_type() == kind and not event.is_user_annotation()
        if is_work:
            start = event.start_ns()
            yield start, start + event.duration_ns()


def covered(spans: Iterable[Span]) -> int:
    """Nanoseconds that lie in any of the spans, each counted once."""
    total, reached = 0, 0
    for start, end in sorted(spans):
        total += max(0, end - max(start, reached))
        reached = max(reached, end)
    return total
