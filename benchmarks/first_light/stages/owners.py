"""Who holds the memory of the highest moment of a plan's steps, beside the owners that the plan expects."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from first_light.alive_at_peak import alive_at_peak, by_owner
from first_light.bench import Bench, Planned
from first_light.stages.grid_points import planned_point
from first_light.stages.speed import speed_plan
from first_light.stages.steps import bytes_text

LARGEST = 25
MAX_EVENTS = 400_000


def of_speed(bench: Bench, size: str, tokens: int, overrides: list[str]) -> dict[str, Any]:
    """The plan that the stage of the same name times."""
    return owners(bench, speed_plan(bench, size, tokens, overrides))


def of_point(
    bench: Bench, method: str, size: str, length: int, adapter: str, strategy: str
) -> dict[str, Any]:
    """A point of the grid."""
    return owners(bench, planned_point(bench, method, size, length, adapter, strategy))


def owners(bench: Bench, planned: Planned) -> dict[str, Any]:
    """Two steps and the heaviest micro-batch, as every measured peak has them, with the allocator's history.

    What is allocated before the steps, weights too, has its frames: the history begins before they are
    loaded. Workspaces of matrix products are blocks of it, and not of the measured peak. A stand-in has no
    such history, and tells what the plan expects.
    """
    from memtrain.cli.measure.variants import TIMED, predicted_of
    from memtrain.memory.estimate.pricing import price
    from memtrain.memory.strategies.registry import used_in
    from memtrain.trainers.memory_meter.workspaces import workspace_bytes
    from memtrain.trainers.tools.bench import bench as bench_steps

    bench.device.freed()
    seen: dict[str, Any] = {}
    with recorded(seen, is_on=bench.device.is_cuda):
        made = bench_steps(planned.plan, 0)
    alive = alive_at_peak(seen.get("events", []), seen.get("at_end", {}))
    rebuilt = sum(one.num_bytes for one in alive)
    phases = price(planned.plan.settings, planned.facts).prediction.phases
    expected = {
        phase.phase: {one.owner: one.num_bytes for one in phase.owners}
        for phase in phases
        if phase.phase in TIMED
    }
    predicted = predicted_of(planned.variant, made.heaviest)
    said = f"{bytes_text(rebuilt)} of {len(alive):,} blocks, " if alive else "no history on a CPU, "
    return {
        "words": f"{said}peak {bytes_text(made.peak_bytes)}, planned {bytes_text(predicted)}",
        "measured_bytes": made.peak_bytes,
        "workspace_bytes": workspace_bytes(bench.device.torch),
        "rebuilt_bytes": rebuilt,
        "planned_bytes": predicted,
        "events": len(seen.get("events", [])),
        "is_cut": len(seen.get("events", [])) >= MAX_EVENTS,
        "last": alive[0].owner if alive else "",
        "owners": by_owner(alive, LARGEST),
        "planned_owners": expected,
        "heaviest": list(made.heaviest),
        "strategies": [one.name for one in used_in(planned.plan.settings)],
    }


@contextmanager
def recorded(seen: dict[str, Any], *, is_on: bool) -> Iterator[None]:
    """Filled at the end with the `events` of the allocator and the blocks that it still has, `at_end`."""
    if not is_on:
        yield
        return
    torch.cuda.memory._record_memory_history(
        "all", context="alloc", stacks="python", max_entries=MAX_EVENTS, clear_history=True
    )
    try:
        yield
        snapshot = torch.cuda.memory._snapshot()
        seen |= allocated_of(snapshot, torch.cuda.current_device())
    finally:
        torch.cuda.memory._record_memory_history(None)


def allocated_of(snapshot: Any, device: int) -> dict[str, Any]:
    """The events and blocks of one device in torch's snapshot."""
    at_end = {
        block["address"]: block["size"]
        for segment in snapshot["segments"]
        if segment["device"] == device
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    }
    return {"events": snapshot["device_traces"][device], "at_end": at_end}
