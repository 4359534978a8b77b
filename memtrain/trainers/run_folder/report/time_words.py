"""Words about the host: Python's share of a step, its memory, and saving; no torch."""

from __future__ import annotations

from collections.abc import Sequence

from memtrain.memory.plan.plan import Plan
from memtrain.memory.plan.units import gib
from memtrain.trainers.protocols.events import HostEvent, HostMemoryEvent, SaveEvent

MOST_OWNERS = 2
"""Owners of the host's memory that are named. Taste."""

LEAST_NAMED = 0.01
"""Share of the host's memory from which on an owner is named. Taste."""

NOTED = 1.05
"""Measured over predicted from which on a CPU's summary says what is not predicted. Taste."""


def host_words(host: HostEvent | None, *, is_on_gpu: bool) -> str:
    """The host's share of the step that was looked at; empty where none was."""
    if host is None:
        return ""
    share = f"{host.waited:.1%}"
    if is_on_gpu:
        return f"GPU waited for the host: {share} of {looked_at(host)}"
    return f"{share} of {looked_at(host)} is Python, not torch's operators"


def looked_at(host: HostEvent) -> str:
    """The part of a run that the share is of."""
    if host.micro_batches == 1:
        return f"step {host.step:,}"
    return f"step {host.step:,} (the last of its {host.micro_batches:,} micro-batches)"


def host_memory_words(found: HostMemoryEvent | None, plan: Plan | None) -> str:
    """The host's memory as measured, beside its prediction with the largest owners; empty where none was
    measured."""
    if found is None:
        return ""
    words = f"{gib(found.resident)} measured"
    if found.processes > 1:
        words += f" in {found.processes} processes"
    if plan is None or not plan.host:
        return words
    predicted = sum(one.num_bytes for one in plan.host)
    named = [one for one in plan.host[:MOST_OWNERS] if one.num_bytes >= LEAST_NAMED * predicted]
    largest = ", ".join(f"{one.owner} {gib(one.num_bytes)}" for one in named)
    words += f", {gib(predicted)} predicted: {largest}"
    if plan.settings.device == "cpu" and found.resident > NOTED * predicted:
        words += "; what the C library keeps of freed blocks is not predicted"
    return words


def save_words(saves: Sequence[SaveEvent]) -> str:
    """Number of checkpoints that were written, and the time that the steps waited for them."""
    held_s = sum(one.seconds if one.held_s is None else one.held_s for one in saves)
    waited_s = sum(one.waited_s for one in saves)
    words = f"{len(saves):,} written, steps waited {held_s:.1f} s"
    return words + (f", {waited_s:.1f} s of it for one still being written" if waited_s >= 0.1 else "")
