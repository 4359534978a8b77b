"""The best plan of each engine, as it was weighed, and the engines that were not weighed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memtrain.memory.estimate.pricing import Priced, fits_host
from memtrain.memory.explain.reasons import time_words
from memtrain.memory.plan.settings import Settings
from memtrain.memory.planner.search import SIMPLEST, fastest
from memtrain.memory.rules.engines import closed_engines
from memtrain.memory.strategies.base import StrategyContext


@dataclass(frozen=True, slots=True)
class RankedEngine:
    """An engine with its host offload and the number of processes that hold a row together."""

    name: str
    best: Priced | None
    """The engine's fastest plan that fits, else its smallest; None: the engine was not weighed."""
    words: str
    """Reason that the engine was taken, or was not."""


def form_words(settings: Settings) -> str:
    """An engine in words: `fsdp2, parameters on the host, 2 a row`."""
    parts = [settings.engine]
    if settings.shard_offload != "none":
        parts.append(f"{settings.shard_offload} on the host")
    if settings.context_parallel > 1:
        by = " by heads" if settings.context_by == "ulysses" else ""
        parts.append(f"{settings.context_parallel} a row{by}")
    return ", ".join(parts)


def rank_engines(
    chosen: Priced, tried: Sequence[Priced], budget: int, case: StrategyContext
) -> tuple[RankedEngine, ...]:
    """Every engine beside the one of the plan; none with one process."""
    if chosen.settings.num_processes == 1:
        return ()
    forms: dict[str, list[Priced]] = {}
    for one in sorted(tried, key=_order):
        forms.setdefault(form_words(one.settings), []).append(one)
    own = form_words(chosen.settings)
    found = [_weighed(name, of_form, own, chosen, budget, case) for name, of_form in forms.items()]
    closed = closed_engines(case.recipe, chosen.settings, case.facts.has)
    return (*found, *(RankedEngine(engine, None, f"not weighed: {why}") for engine, why in closed))


def _order(one: Priced) -> tuple[int, int, str]:
    settings = one.settings
    return (settings.context_parallel, SIMPLEST.index(settings.engine), settings.shard_offload)


def _weighed(
    name: str, of_form: Sequence[Priced], own: str, chosen: Priced, budget: int, case: StrategyContext
) -> RankedEngine:
    facts = case.facts
    best = fastest(of_form, budget, facts, case.recipe.memory.headroom)
    if name == own:
        return RankedEngine(name, chosen, "taken")
    if best is not None:
        return RankedEngine(name, best, time_words(best.token_s / chosen.token_s))
    smallest = min(of_form, key=lambda one: one.need_bytes)
    if smallest.need_bytes <= budget and not fits_host(smallest, facts):
        return RankedEngine(name, smallest, "does not fit the host's memory")
    return RankedEngine(name, smallest, "does not fit")
