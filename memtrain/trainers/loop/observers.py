"""Watches of a run's steps: the host's share of one, compilations, and memory that grows."""

from __future__ import annotations

import os
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import combinations, pairwise
from statistics import median
from typing import Protocol

import psutil
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import _get_current_dispatch_mode

from memtrain.memory.hardware.host import host_memory
from memtrain.memory.plan.plan import Plan
from memtrain.memory.plan.units import gib
from memtrain.trainers.memory_meter.object_census import ObjectCensus
from memtrain.trainers.model.loading.compiled_layers import CompiledGraphs
from memtrain.trainers.model.loading.load import local_device
from memtrain.trainers.protocols.events import HostEvent, NoteEvent
from memtrain.trainers.protocols.position import TrainState
from memtrain.trainers.run_folder.event_sinks import EventSinks
from memtrain.trainers.runtime.launch_time import measure_launches
from memtrain.trainers.runtime.ranks import Ranks

# Host time of a step: the share in which no operator was at work, as Python had not asked for one yet.
#
# Of a step of many micro-batches, the last one and the update are looked at: the profiler keeps a record of
# every operator in host memory, 180 MiB for 15 micro-batches of a tiny model.


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


# Memory that rises over the steps of a run: told while there is time to act, with the objects that grew.
#
# The memory of normal runs rises in their first steps, with every longest batch so far, and with evaluations
# and saves; then it stays. A leak rises by about the same in every stretch of steps. So the lowest values of
# the last stretches are held against one another: each above the one before, by about the same, none of the
# rise dying away, and the last stretch wholly above the first.


BLOCK_STEPS = 8
"""Steps of a stretch. Taste."""
NUM_BLOCKS = 6
"""Stretches that are held against one another: by chance six values come in order once in 720."""
LEAST_RISE = 0.25
"""Smallest rise between two stretches, as a share of the usual one. Taste."""
LEAST_LASTING = 0.7
"""The last two rises, as a share of the first two: a start that levels off has less. Taste."""
LEAST_BYTES = 16 * 2**20
"""Growth of all stretches that is not told: caches of interpreters and allocators. Taste."""
MUCH_BYTES = 64 * 2**20
"""Growth of all stretches that is told whatever is free. Taste."""
LEAST_SHARE = 0.05
"""Growth until the end of the run that is told, as a share of what is free. Taste."""

Bytes = Callable[[], int]


class Census(Protocol):
    """Objects that hold memory, counted at one moment."""

    def grown(self) -> list[str]:
        """The objects that grew since, the largest growth first, in words."""
        ...


@dataclass(frozen=True, slots=True)
class Place:
    """A memory that is watched."""

    name: str
    used: Bytes
    """Bytes that this process holds in it now."""
    free: Bytes
    """Bytes that it could still take."""


@dataclass(slots=True)
class _Seen:
    """The last steps in one place."""

    samples: deque[int]
    census: Census | None = None
    since: int = 0
    """Step of the census."""
    is_told: bool = False


@dataclass(slots=True)
class GrowthWatch:
    """Looks at memory after every step, and tells of growth once for each place.

    A first suspicion counts the objects, a second one, half a window later, tells of those that grew between.
    """

    places: Sequence[Place]
    last_step: int
    count: Callable[[], Census]
    note: Callable[[int, str], object]
    """Takes the step and the words."""
    most_tokens: int = 0
    seen: dict[str, _Seen] = field(default_factory=dict)

    def stepped(self, step: int, num_tokens: int) -> None:
        """Look at the memory after a step of so many tokens."""
        if num_tokens > self.most_tokens:
            # A longer batch than ever before may take what it likes.
            self.most_tokens = num_tokens
            self.seen = {name: one for name, one in self.seen.items() if one.is_told}
        for place in self.places:
            seen = self.seen.setdefault(place.name, _Seen(deque(maxlen=BLOCK_STEPS * NUM_BLOCKS)))
            if seen.is_told:
                continue
            seen.samples.append(place.used())
            if len(seen.samples) == seen.samples.maxlen:
                self._judge(place, seen, step)

    def _judge(self, place: Place, seen: _Seen, step: int) -> None:
        rate = steady_growth(list(seen.samples))
        if rate is None or not self._matters(place, rate, step):
            seen.census = None
        elif seen.census is None:
            seen.census, seen.since = self.count(), step
        elif step - seen.since >= BLOCK_STEPS * NUM_BLOCKS // 2:
            seen.is_told = True
            self.note(step, self._words(place, seen, rate, step))
            seen.census = None

    def _matters(self, place: Place, rate: float, step: int) -> bool:
        grown = rate * BLOCK_STEPS * NUM_BLOCKS
        to_come = rate * (self.last_step - step)
        return grown >= MUCH_BYTES or (grown >= LEAST_BYTES and to_come >= LEAST_SHARE * place.free())

    def _words(self, place: Place, seen: _Seen, rate: float, step: int) -> str:
        free = place.free()
        steps = int(free / rate)
        end = (
            f"is used up after {steps:,} more steps"
            if steps < self.last_step - step
            else "lasts for this run"
        )
        found = seen.census.grown() if seen.census is not None else []
        who = "; ".join(found) or "no Python object: memory of a library, or of an allocator"
        return (
            f"{place.name} memory grows by {gib(rate)} a step (now {gib(seen.samples[-1])}); the free "
            f"{gib(free)} {end}. Grown in {step - seen.since} steps: {who}"
        )


def steady_growth(samples: Sequence[int]) -> float | None:
    """Bytes a step by which `samples`, one a step, rise all the time; None where they do not.

    Source: the median of slopes, of the lowest sample of each stretch (Theil 1950, Sen 1968).
    """
    blocks = [samples[start : start + BLOCK_STEPS] for start in range(0, len(samples), BLOCK_STEPS)]
    lowest = [min(block) for block in blocks]
    rises = [after - before for before, after in pairwise(lowest)]
    if min(rises) <= 0 or min(rises) < LEAST_RISE * median(rises) or lowest[-1] <= max(blocks[0]):
        return None
    if sum(rises[-2:]) < LEAST_LASTING * sum(rises[:2]):
        return None
    slopes = [(b - a) / (j - i) for (i, a), (j, b) in combinations(enumerate(lowest), 2)]
    return median(slopes) / BLOCK_STEPS


def host_time_of(plan: Plan, sinks: EventSinks, position: TrainState, ranks: Ranks) -> HostTime:
    """Look at one step of the main rank, where steps are measured at all."""

    def note(waited: float, seconds: float, num_parts: int) -> None:
        event = HostEvent(step=position.step + 1, waited=waited, seconds=seconds, micro_batches=num_parts)
        sinks.emit(event)

    is_on = ranks.is_main and plan.recipe.memory.measure_peaks
    if is_on:
        measure_launches(local_device(plan.settings))
    return HostTime(local_device(plan.settings), note, is_on=is_on)


StepWatch = Callable[[int, int], None]
"""Called after each step with its number, the first of which is 1, and its tokens."""


def step_watch(plan: Plan, sinks: EventSinks, ranks: Ranks) -> StepWatch:
    """All that looks at every step."""
    compilations, growth = _compilations_of(plan, sinks), _growth_of(plan, sinks, ranks)

    def stepped(step: int, num_tokens: int) -> None:
        compilations(step)
        growth(step, num_tokens)

    return stepped


def _compilations_of(plan: Plan, sinks: EventSinks) -> Callable[[int], None]:
    """A watch that tells of compilations after a step; without compiled layers nothing to look at."""
    if not plan.settings.compiled:
        return lambda step: None
    return CompiledGraphs(lambda step, text: sinks.emit(NoteEvent(step=step, text=text))).stepped


def _growth_of(plan: Plan, sinks: EventSinks, ranks: Ranks) -> StepWatch:
    """A watch of the main rank's memory, where steps are measured at all."""
    if not (ranks.is_main and plan.recipe.memory.measure_peaks):
        return lambda step, num_tokens: None
    return GrowthWatch(
        _places(local_device(plan.settings)),
        last_step=plan.settings.max_steps,
        count=ObjectCensus,
        note=lambda step, text: sinks.emit(NoteEvent(step=step, text=text)),
    ).stepped


def _places(device: torch.device) -> list[Place]:
    """The host, and a GPU."""
    process = psutil.Process()

    def resident() -> int:
        """Without mapped files, whose pages come back."""
        memory = process.memory_info()
        return memory.rss - getattr(memory, "shared", 0)

    host = Place("host", resident, lambda: host_memory()[1])
    if device.type != "cuda":
        return [host]

    def left() -> int:
        """Free bytes of the GPU, and those that the allocator holds and nobody uses."""
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + held

    return [host, Place("GPU", lambda: torch.cuda.memory_allocated(device), left)]
