"""Watches of a run's steps: the host's share of one, and compilations."""

from __future__ import annotations

from collections.abc import Callable

from memtrain.memory.plan.plan import Plan
from memtrain.trainers.model.loading.compiled_layers import CompiledGraphs
from memtrain.trainers.model.loading.load import local_device
from memtrain.trainers.protocols.events import HostEvent, NoteEvent
from memtrain.trainers.protocols.position import TrainState
from memtrain.trainers.run_folder.event_sinks import EventSinks
from memtrain.trainers.runtime.host_time import HostTime
from memtrain.trainers.runtime.ranks import Ranks


def host_time_of(plan: Plan, sinks: EventSinks, position: TrainState, ranks: Ranks) -> HostTime:
    """Look at one step of the main rank, where steps are measured at all."""

    def note(waited: float, seconds: float) -> None:
        sinks.emit(HostEvent(step=position.step + 1, waited=waited, seconds=seconds))

    is_on = ranks.is_main and plan.recipe.memory.measure_peaks
    return HostTime(local_device(plan.settings), note, is_on=is_on)


def compilations_of(plan: Plan, sinks: EventSinks) -> Callable[[int], None]:
    """A watch that tells of compilations after a step; without compiled layers nothing to look at."""
    if not plan.settings.compiled:
        return lambda step: None
    return CompiledGraphs(lambda step, text: sinks.emit(NoteEvent(step=step, text=text))).stepped
