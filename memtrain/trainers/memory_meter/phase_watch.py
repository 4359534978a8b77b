"""Measured memory: the peak of every phase, beside which the prediction stands."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import psutil
import torch

from memtrain.trainers.memory_meter.live_tensors import TensorPeak

WATCHED_STEPS = 2
"""Steady steps whose tensors are counted one by one on a CPU; after these, only heavier ones."""


@dataclass(slots=True)
class MemoryWatch:
    """Peak bytes by phase.

    On CUDA the caching allocator counts, in every step and for nothing. On a CPU live tensors are counted by
    a dispatch mode, which costs time: in the first steps, and in each that has more tokens than those before.
    """

    device: torch.device
    resident_bytes: int
    """Bytes of weights and optimizer state that are there before a phase (CPU: the mode sees only new
    tensors)."""
    note: Callable[[str, int, int, int], None]
    """Takes (phase, allocated, reserved, resident memory of the process) of every new highest peak."""
    is_on: bool = True
    counting: type[TensorPeak] = TensorPeak
    """Counts live tensors on a CPU."""
    peak_bytes: int = 0
    """Highest peak of any phase so far."""
    phases: dict[str, int] = field(default_factory=dict)
    _most_tokens: int = 0
    _steps_seen: int = 0

    @contextmanager
    def phase(self, name: str, *, tokens: int | None = None) -> Iterator[None]:
        """Measure the enclosed work as the phase `name`; `tokens` is the weight of a step."""
        if not self.is_on:
            yield
        elif self.device.type == "cuda":
            with self._cuda_phase(name):
                yield
        elif self._is_worth_counting(tokens):
            with self.counting() as counted:
                yield
            self._note(name, self.resident_bytes + counted.peak_bytes, 0)
            self.resident_bytes += counted.left_bytes
        else:
            yield

    def _is_worth_counting(self, tokens: int | None) -> bool:
        if tokens is None:
            return True
        self._steps_seen += 1
        heavier = tokens > self._most_tokens
        self._most_tokens = max(tokens, self._most_tokens)
        return heavier or self._steps_seen <= WATCHED_STEPS

    @contextmanager
    def _cuda_phase(self, name: str) -> Iterator[None]:
        torch.cuda.reset_peak_memory_stats(self.device)
        yield
        self._note(
            name, torch.cuda.max_memory_allocated(self.device), torch.cuda.max_memory_reserved(self.device)
        )

    def _note(self, name: str, allocated: int, reserved: int) -> None:
        self.peak_bytes = max(self.peak_bytes, allocated)
        if allocated <= self.phases.get(name, -1):
            return
        self.phases[name] = allocated
        self.note(name, allocated, reserved, psutil.Process().memory_info().rss)
