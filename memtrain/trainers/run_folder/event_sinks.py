"""Receivers of a run's events: the metrics, the terminal and the trackers, on the main rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from memtrain.memory.plan.plan import Plan
from memtrain.trainers.protocols.events import EvalEvent, Event, NoteEvent, StepEvent
from memtrain.trainers.protocols.position import TrainState
from memtrain.trainers.run_folder.folder import RunFolder
from memtrain.trainers.run_folder.metrics import MetricsWriter
from memtrain.trainers.run_folder.progress import Progress
from memtrain.trainers.run_folder.trackers import open_trackers
from memtrain.trainers.runtime.ranks import Ranks


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
