"""Watches of a run's steps: the host's share of one, compilations, and memory that grows."""

from __future__ import annotations

from collections.abc import Callable

import psutil
import torch

from memtrain.memory.hardware.host import host_memory
from memtrain.memory.plan.plan import Plan
from memtrain.trainers.memory_meter.growth import GrowthWatch, Place
from memtrain.trainers.memory_meter.object_census import ObjectCensus
from memtrain.trainers.model.loading.compiled_layers import CompiledGraphs
from memtrain.trainers.model.loading.load import local_device
from memtrain.trainers.protocols.events import HostEvent, NoteEvent
from memtrain.trainers.protocols.position import TrainState
from memtrain.trainers.run_folder.event_sinks import EventSinks
from memtrain.trainers.runtime.host_time import HostTime
from memtrain.trainers.runtime.ranks import Ranks


def host_time_of(plan: Plan, sinks: EventSinks, position: TrainState, ranks: Ranks) -> HostTime:
    """Look at one step of the main rank, where steps are measured at all."""

    def note(waited: float, seconds: float, num_parts: int) -> None:
        event = HostEvent(step=position.step + 1, waited=waited, seconds=seconds, micro_batches=num_parts)
        sinks.emit(event)

    is_on = ranks.is_main and plan.recipe.memory.measure_peaks
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
