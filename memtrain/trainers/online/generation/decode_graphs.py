"""Captured passes of a sampler, until one cannot be captured: from then on they are computed one by one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from memtrain.errors import first_line_of
from memtrain.trainers.runtime.cuda_graphs import Recorder, Run


@dataclass(slots=True)
class DecodeGraphs:
    """Recordings of a sampler, until one fails: the same tokens are written without them from then on."""

    make: Callable[[], Recorder]
    emit: Callable[[str], None]
    recorder: Recorder | None = None
    is_on: bool = True
    is_rehearsed: bool = False
    """A pass was computed by hand, and nothing in it speaks against a recording."""

    def rehearse(self, run: Run) -> None:
        """Compute `run`, and record none of its kind where it cannot be recorded."""
        self.recorder = self.recorder or self.make()
        reason = self.recorder.rehearse(run)
        self.is_rehearsed = not reason
        if reason:
            self.give_up(reason)

    def record(self, run: Run) -> Run | None:
        """The recording of `run`; None where there is none to be had."""
        if not self.is_on:
            return None
        try:
            self.recorder = self.recorder or self.make()
            return self.recorder.record(run)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self.give_up(first_line_of(error))
            return None

    def give_up(self, reason: str) -> None:
        """Record nothing from now on, and tell it."""
        self.is_on = False
        self.emit(
            "the passes of this model that write a token cannot be captured as CUDA graphs: without them the "
            f"completions are the same, and take longer ({reason})"
        )

    def release(self) -> None:
        """Give back the memory of all recordings."""
        if self.recorder is not None:
            self.recorder.release()
