"""Receivers of a run's events: the metrics, the terminal and the trackers, on the main rank."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from memtrain.errors import DataError
from memtrain.memory.plan.plan import Plan
from memtrain.trainers.protocols.events import (
    EvalEvent,
    Event,
    FinalEvent,
    NoteEvent,
    StepEvent,
    from_line,
    from_values,
    to_line,
)
from memtrain.trainers.protocols.position import TrainState
from memtrain.trainers.run_folder.folder import RunFolder
from memtrain.trainers.run_folder.progress import Progress
from memtrain.trainers.run_folder.trackers import open_trackers
from memtrain.trainers.runtime.atomic_files import disk_fault, write_whole
from memtrain.trainers.runtime.ranks import Ranks

# `metrics.jsonl`: written line by line, cut on resume to hold every step once, read back; no torch.


class MetricsWriter:
    """Appends events; each is with the operating system when `write` returns, so that a kill loses none."""

    def __init__(self, path: Path, resumed_at: int | None = None) -> None:
        """Begin the file anew, or with `resumed_at` go on behind the last line of that step.

        Raises: LaunchError when the disk refuses; DataError as `read_metrics`.
        """
        self.path = path
        self.step = resumed_at or 0
        """Step of the last event."""
        try:
            write_whole(path, "".join(_lines_up_to(path, resumed_at)))
            self._file = open(path, "a")  # noqa: SIM115 (stays open until `close`)
        except OSError as error:
            raise disk_fault(error, "the metrics cannot be written", path) from None

    def write(self, event: Event | Mapping[str, Any]) -> None:
        """Append an event, or its fields; a missing step is the last written.

        Raises: LaunchError when the disk refuses.
        """
        if isinstance(event, Mapping):
            event = from_values({"step": self.step} | dict(event))
        # A save that was written beside the steps is reported after them.
        self.step = max(self.step, event.step)
        try:
            self._file.write(to_line(event, time.time()) + "\n")
            self._file.flush()
        except OSError as error:
            raise disk_fault(error, "the metrics cannot be written", self.path) from None

    def sync(self) -> None:
        """Hold until every line is on the disk: before a checkpoint, which must not outlive its metrics."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Write nothing more."""
        self._file.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_metrics(path: Path) -> list[Event]:
    """The events of a file, in order; none where there is no file. A last line without an end is left out.

    Raises: DataError naming the line that is no event.
    """
    return [event for _, event in _read(path)]


def _lines_up_to(path: Path, step: int | None) -> list[str]:
    """Lines that a run which goes on after `step` keeps: without the end of a run that was cut off."""
    if step is None:
        return []
    return [line for line, event in _read(path) if event.step <= step and not isinstance(event, FinalEvent)]


def _read(path: Path) -> Iterator[tuple[str, Event]]:
    """Each whole line, with its end, and its event."""
    lines = path.read_text(errors="replace").splitlines(keepends=True) if path.exists() else []
    for number, line in enumerate(lines, start=1):
        if not line.endswith("\n"):
            return
        try:
            yield line, from_line(line)
        except ValueError as error:
            what = f"this line of the metrics is not an event: {error}"
            raise DataError(what, where=f"{path}:{number}", fix="remove the line") from None


@dataclass(frozen=True, slots=True)
class EventSinks:
    """Takes events; on other ranks than the main one it does nothing."""

    emit: Callable[[Event], None]
    print_line: Callable[[str], None]
    """Puts a line on the terminal and into the log, and nowhere else."""
    sync: Callable[[], None]
    """Holds until the metrics are on the disk: a checkpoint must not outlive them."""


@contextmanager
def open_sinks(plan: Plan, folder: RunFolder, ranks: Ranks, position: TrainState) -> Iterator[EventSinks]:
    """The sinks of this rank, until the end of the run. Metrics after `position` are cut off."""
    if not ranks.is_main:
        yield EventSinks(emit=lambda event: None, print_line=lambda text: None, sync=lambda: None)
        return
    with ExitStack() as stack:
        metrics = stack.enter_context(MetricsWriter(folder.metrics, resumed_at=position.step or None))
        trackers = [open_trackers(plan, folder)] if plan.recipe.log.trackers else []
        for tracker in trackers:
            stack.callback(tracker.close)
        progress = stack.enter_context(
            Progress(
                plan.settings.max_steps,
                every_steps=plan.recipe.log.every_steps,
                first_step=position.step,
                log=folder.log,
                metrics=plan.recipe.eval.metric_names,
            )
        )

        def emit(event: Event) -> None:
            metrics.write(event)
            for tracker in trackers:
                tracker.emit(event)
            if isinstance(event, StepEvent):
                progress.stepped(event)
            elif isinstance(event, EvalEvent):
                progress.evaluated(event)
            elif isinstance(event, NoteEvent):
                progress.print_line(event.text, is_shown=not event.is_in_plan)

        yield EventSinks(emit, progress.print_line, metrics.sync)
