"""The refusal when no plan fits: who holds the memory, and the nearest ways out with their peaks."""

from __future__ import annotations

from memtrain.errors import DoesNotFit, Fault
from memtrain.memory.budget import usable
from memtrain.memory.context import context_faults
from memtrain.memory.facts import MARGIN_BYTES, MARGIN_SHARE, Facts, Priced, heaviest
from memtrain.memory.rules import Asked
from memtrain.memory.units import gib
from memtrain.memory.ways_out import WayOut, ways_out


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
    fix = "\n   or: ".join(way.words() for way in ways)
    if ways and ways[0].peak_bytes > _limit(closest, budget):
        fix = f"a larger device; the furthest that changes of the recipe go is {fix}"
    if facts.hardware.device == "cuda" and closest.settings.engine == "ddp":
        fix += "\n  note: several GPUs share gradients and moments with cluster.engine: fsdp2"
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


def _limit(closest: Priced, budget: int) -> int:
    """Bytes of live tensors that fit a budget with margin."""
    return usable(int((budget - MARGIN_BYTES) / (1 + MARGIN_SHARE)), closest.settings)
