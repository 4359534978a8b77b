"""The refusal when no plan fits: who holds the memory, and the nearest ways out with their peaks."""

from __future__ import annotations

from memtrain.errors import DoesNotFit, Fault
from memtrain.memory.budget import usable
from memtrain.memory.context import context_faults
from memtrain.memory.engines import fsdp2_faults, loads_shards
from memtrain.memory.estimate import estimate
from memtrain.memory.exclusions import excluded
from memtrain.memory.facts import MARGIN_BYTES, MARGIN_SHARE, Facts, Priced, heaviest
from memtrain.memory.rules import Asked
from memtrain.memory.units import gib
from memtrain.memory.ways_out import Change, WayOut, ways_out

MOST = 3
"""Ways out that are told."""


def nearest_ways(closest: Priced, budget: int, facts: Facts, *, can_slice: bool = False) -> list[WayOut]:
    """At most three changes of the recipe that fit a budget with margin, the fewest changes first.

    `can_slice`: nothing forbids that processes hold rows together.
    """
    settings, limit = closest.settings, _limit(closest, budget)
    return ways_out(settings, facts.shape, heaviest(settings, facts), limit, can_slice=can_slice)


def nothing_fits(closest: Priced, budget: int, asked: Asked, facts: Facts) -> DoesNotFit:
    """The error: the smallest plan there is, its largest owners, and three ways out."""
    peak = closest.prediction.peak
    owners = ", ".join(f"{owned.owner} {gib(owned.num_bytes)}" for owned in peak.owners[:3])
    can_slice = not context_faults(asked.recipe, facts.config)
    ways = nearest_ways(closest, budget, facts, can_slice=can_slice)
    gpus = fewest_gpus(closest, budget, asked, facts)
    fits = bool(ways) and ways[0].peak_bytes <= _limit(closest, budget)
    if fits and gpus is not None:
        # It learns the same, which most changes of a recipe do not.
        ways = [*ways[: MOST - 1], gpus]
    fix = "\n   or: ".join(way.words() for way in ways)
    if ways and not fits:
        fix = f"a larger device; the furthest that changes of the recipe go is {fix}"
        fix = fix if gpus is None else f"{gpus.words()}\n   or: {fix}"
    return DoesNotFit(
        [
            Fault(
                f"no plan fits {gib(budget)}: the smallest needs {gib(closest.need_bytes)} with its margin, "
                f"{gib(peak.num_bytes)} of it live tensors in the {peak.phase} ({owners})",
                asked.where("memory.budget") if asked.said("memory.budget") else "",
                fix,
            )
        ]
    )


def fewest_gpus(closest: Priced, budget: int, asked: Asked, facts: Facts) -> WayOut | None:
    """The fewest GPUs that hold the run in FSDP2's shards, with the peak of each; None: no number does."""
    settings = closest.settings
    if settings.device != "cuda" or settings.engine != "ddp" or fsdp2_faults(asked.recipe):
        return None
    batch = heaviest(settings, facts)
    if settings.offload == "all":
        # Whole layers do not travel with shards; their inputs do.
        settings = settings.model_copy(update={"offload": "boundaries", "checkpoint_every": 1})
    for count in (2, 4, 8, 16, 32, 64):
        if count <= settings.num_processes:
            continue
        updates: dict[str, object] = {"num_processes": count, "engine": "fsdp2", "in_backward": False}
        shared = settings.model_copy(update=updates)
        shared = shared.model_copy(update={"loads_shards": loads_shards(asked.recipe, shared)})
        peak = estimate(shared, facts.shape, batch).peak.num_bytes
        if excluded(shared) is None and peak <= usable(_left(budget), shared):
            return WayOut((Change(f"{count} GPUs with cluster.engine: fsdp2", updates),), peak)
    return None


def _left(budget: int) -> int:
    """A budget less its margin."""
    return int((budget - MARGIN_BYTES) / (1 + MARGIN_SHARE))


def _limit(closest: Priced, budget: int) -> int:
    """Bytes of live tensors that fit a budget with margin."""
    return usable(_left(budget), closest.settings)
