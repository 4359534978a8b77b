"""Measured memory: the peak of every phase, beside which the prediction stands."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import psutil
import torch

from memtrain.trainers.memory_meter.live_tensors import TensorPeak
from memtrain.trainers.memory_meter.workspaces import begin_peak, peak_of_tensors

WATCHED_STEPS = 2
"""First steps whose tensors are counted one by one on a CPU; after these, only heavier ones."""
WATCHED_AHEAD = 128
"""Number of coming steps among which the heaviest is counted. A lighter step before it is left out:
counting takes half of a small model's step. Taste."""


class StepWeight(NamedTuple):
    """Weight of a step beside others."""

    tokens: int
    most_coming: Callable[[], int]
    """Most tokens of a step that comes soon; asked where this one is heavier than those so far."""
    largest: Callable[[], int] = lambda: 0
    """Tokens of its largest micro-batch, padding included; asked where it needed most so far."""


@dataclass(slots=True)
class MemoryWatch:
    """Peak bytes by phase.

    On CUDA the caching allocator counts, in every step and for nothing; what is no tensor is taken off. On a
    CPU a dispatch mode counts live tensors, which takes time: in the first steps, and in each that has
    more tokens than those before it and those that come soon.
    """

    device: torch.device
    resident_bytes: int
    """Bytes of weights and optimizer state that are there before the first phase (CPU: the mode sees only
    tensors that are made in one)."""
    note: Callable[[str, int, int, int, int], None]
    """Takes (phase, allocated, reserved, resident memory of the process, tokens of the largest micro-batch)
    of every new highest peak."""
    is_on: bool = True
    counting: type[TensorPeak] = TensorPeak
    """Counts live tensors on a CPU."""
    peak_bytes: int = 0
    """Highest peak of any phase so far."""
    phases: dict[str, int] = field(default_factory=dict)
    _most_tokens: int = 0
    _steps_seen: int = 0
    _counter: TensorPeak | None = None

    @contextmanager
    def phase(self, name: str, step: StepWeight | None = None) -> Iterator[None]:
        """Measure the enclosed work as the phase `name`; of a step where it is worth it."""
        if not self.is_on:
            yield
        elif self.device.type == "cuda":
            with self._cuda_phase(name, step):
                yield
        elif step is None or self._is_worth_counting(step):
            with self._counted_anew() as counted:
                yield
            self._note(name, self.resident_bytes + counted.peak_bytes, 0, step)
        else:
            yield

    def _counted_anew(self) -> TensorPeak:
        """The counter, whose peak begins at what is there of the tensors that it has seen.

        One for all phases: what is left by one of them may be gone in a later one. What a step makes that is
        not counted is not seen.
        """
        if self._counter is None:
            self._counter = self.counting()
        self._counter.peak_bytes = self._counter.live_bytes
        return self._counter

    def _is_worth_counting(self, step: StepWeight) -> bool:
        self._steps_seen += 1
        if self._steps_seen <= WATCHED_STEPS:
            self._most_tokens = max(step.tokens, self._most_tokens)
            return True
        if step.tokens <= self._most_tokens or step.most_coming() > step.tokens:
            return False
        self._most_tokens = step.tokens
        return True

    @contextmanager
    def _cuda_phase(self, name: str, step: StepWeight | None) -> Iterator[None]:
        begin_peak(self.device)
        yield
        allocated = peak_of_tensors(self.device)
        self._note(name, allocated, torch.cuda.max_memory_reserved(self.device), step)

    def _note(self, name: str, allocated: int, reserved: int, step: StepWeight | None) -> None:
        self.peak_bytes = max(self.peak_bytes, allocated)
        if allocated <= self.phases.get(name, -1):
            return
        self.phases[name] = allocated
        tokens = 0 if step is None else step.largest()
        self.note(name, allocated, reserved, psutil.Process().memory_info().rss, tokens)
