"""The search: every choice that a recipe leaves open, priced, and the fastest that fits with margin."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import get_args

from memtrain.memory.estimate.pricing import PlannerInputs, Priced, fits_host, price
from memtrain.memory.plan.optimizers import OPTIMIZERS
from memtrain.memory.plan.settings import Settings
from memtrain.memory.plan.units import MIB
from memtrain.memory.rules.batching import Micro
from memtrain.memory.rules.engines import OFFLOADS, open_forms, under_engine
from memtrain.memory.rules.weights_offload import is_asked
from memtrain.memory.strategies.base import StrategyContext, StrategyGroup
from memtrain.memory.strategies.exclusions import excluded
from memtrain.memory.strategies.registry import STRATEGIES, is_searched, wish_of

TIE = 0.03
"""Plans whose times differ by less are taken to be equally fast: the prediction cannot tell them apart.
The one that needs less memory is then chosen. Source: the design's rule; half of what recomputation costs."""

ENGINE_TIE = 0.1
"""The same for engines, whose communication is priced by a guess. Taste."""

ROOM_COST = 0.1
"""Share of its speed that a plan may lose to leave `memory.headroom` free: a card that is filled to its last
0.1 % for 8 % of speed fails at the first batch that fragments it. Taste."""

LARGE_ADAPTER = 512 * MIB
"""Bytes of an adapter's weights and gradients from which on a plan weighs it on the host beside frozen
weights there; a smaller one goes where nothing else fits. Taste."""

SIMPLEST = tuple(OFFLOADS)
"""Engines in the order in which equally fast ones are taken."""


@dataclass(frozen=True, slots=True)
class Space:
    """Plans that are left open."""

    exact: tuple[Settings, ...]
    """Plans with the same numbers, in the order of the strategies."""
    stepping: tuple[Settings, ...]
    """The same, with the optimizer stepping in the backward pass: such a step cannot be made again."""
    waiting: tuple[Settings, ...]
    """The same with shards or weights of layers that wait on the host, where the recipe leaves that open."""
    last: tuple[Settings, ...]
    """The same with an adapter on the host that is too small to be worth its way (LARGE_ADAPTER)."""
    changing: tuple[tuple[Settings, ...], ...]
    """Plans with another result, which the recipe allows: with one such change, with two, ..."""

    @property
    def groups(self) -> tuple[tuple[Settings, ...], ...]:
        """The plans to weigh, group by group: a later one is taken where nothing of an earlier one fits, and
        `waiting` also where all that fits leans on the bus and is slower."""
        return tuple(group for group in self._in_order if group)

    @property
    def _in_order(self) -> tuple[tuple[Settings, ...], ...]:
        return (self.exact, self.stepping, self.waiting, self.last, *self.changing)


def space(
    base: Settings, case: StrategyContext, micro_batches: Sequence[Micro], wholes: Sequence[Micro | None]
) -> Space:
    """Every combination that no rule excludes. `wholes`: see `in_backward_choices`."""
    forms = open_forms(case.recipe, base, case.facts.has)
    options = [under_engine(case.recipe, base, form) for form in forms]
    for axis in get_args(StrategyGroup):
        options = _along(axis, options, case)
    names = {name for name in case.recipe.memory.use if is_searched(STRATEGIES[name])}
    is_pinned = None not in wholes
    exact: dict[Settings, None] = {}
    stepping: dict[Settings, None] = {}
    waiting: dict[Settings, None] = {}
    last: dict[Settings, None] = {}
    is_small = base.adapter is not None and 8 * case.facts.shape.num_adapter(base.adapter) < LARGE_ADAPTER
    is_open = case.recipe.cluster.cpu_offload == "auto"
    may_wait = not is_asked(case.asked)
    changing: dict[int, dict[Settings, None]] = {}
    for option in options:
        for whole in wholes:
            for micro_batch in micro_batches if whole is None else (whole,):
                settings = option.model_copy(
                    update={
                        "micro_batch_size": micro_batch.rows,
                        "micro_tokens": micro_batch.tokens,
                        "in_backward": whole is not None,
                    }
                )
                if excluded(settings) or not all(STRATEGIES[name].is_used(settings) for name in names):
                    continue
                group = exact if whole is None or is_pinned else stepping
                is_waiting = (is_open and option.shard_offload != "none") or (
                    may_wait and option.weights_offload
                )
                group = waiting if is_waiting else group
                if is_small and is_waiting and option.adapters_offload:
                    group = last
                count = _num_changes(settings, base, case)
                (changing.setdefault(count, {}) if count else group)[settings] = None
    by_count = tuple(tuple(changing[count]) for count in sorted(changing))
    return Space(tuple(exact), tuple(stepping), tuple(waiting), tuple(last), by_count)


def _along(axis: StrategyGroup, options: Iterable[Settings], case: StrategyContext) -> list[Settings]:
    """Each option with each choice of an axis: the required ones, or none, and the allowed ones."""
    here = [strategy for strategy in STRATEGIES.values() if strategy.axis == axis and is_searched(strategy)]
    wishes = {strategy.name: wish_of(strategy, case) for strategy in here}
    made: list[Settings] = []
    for option in options:
        musts = [
            option.model_copy(update=update)
            for strategy in here
            if wishes[strategy.name] == "on"
            for update in strategy.changes(option, case)
        ]
        mays = [
            option.model_copy(update=update)
            for strategy in here
            if wishes[strategy.name] == "auto" and strategy.refusal(case) is None
            for update in strategy.changes(option, case)
        ]
        made += list(dict.fromkeys([*(musts or [option]), *mays]))
    return made


def _num_changes(settings: Settings, base: Settings, case: StrategyContext) -> int:
    """Strategies that change the result, beyond the recipe's own."""
    asked = case.recipe.memory.use
    return sum(
        strategy.is_used(settings)
        for strategy in STRATEGIES.values()
        if not strategy.is_exact and not strategy.is_used(base) and strategy.name not in asked
    )


def price_all(choices: Iterable[Settings], facts: PlannerInputs) -> list[Priced]:
    """Memory and time of each."""
    return [price(settings, facts) for settings in choices]


def fastest(
    priced: Sequence[Priced], budget: int, facts: PlannerInputs, headroom: float = 0.0
) -> Priced | None:
    """The fastest that fits budget and host; of equally fast ones the least moved, then whole layers, then
    the simplest engine, chunked logits, then the smallest. A simpler engine goes before one that is a little
    faster (ENGINE_TIE); one that leaves `headroom` of the budget free before one that does not (ROOM_COST).
    """
    best = _fastest(priced, budget, facts)
    if best is None or best.need_bytes <= budget * (1 - headroom):
        return best
    least_moved = [one for one in priced if num_moved(one) <= num_moved(best)]
    roomy = _fastest(least_moved, int(budget * (1 - headroom)), facts)
    return roomy if roomy is not None and roomy.token_s < best.token_s * (1 + ROOM_COST) else best


def _fastest(priced: Sequence[Priced], budget: int, facts: PlannerInputs) -> Priced | None:
    """The same, however full the device becomes."""
    fitting = [one for one in with_room_on_host(priced, facts) if one.need_bytes <= budget]
    if not fitting:
        return None
    best = _of_equally_fast(fitting)
    limit = best.token_s * (1 + ENGINE_TIE)
    least_moved = [one for one in fitting if num_moved(one) <= num_moved(best)]
    for engine in SIMPLEST[: SIMPLEST.index(best.settings.engine)]:
        simpler = [one for one in least_moved if one.settings.engine == engine]
        if simpler and min(one.token_s for one in simpler) <= limit:
            return _of_equally_fast(simpler)
    return best


def with_room_on_host(priced: Sequence[Priced], facts: PlannerInputs) -> list[Priced]:
    """Plans that the host has memory for, in preparation, steps and saves."""
    return [one for one in priced if fits_host(one, facts)]


def _of_equally_fast(fitting: Sequence[Priced]) -> Priced:
    limit = min(one.token_s for one in fitting) * (1 + TIE)
    return min(
        (one for one in fitting if one.token_s <= limit),
        key=lambda one: (
            num_moved(one),
            one.settings.slice_tokens > 0,
            SIMPLEST.index(one.settings.engine),
            one.settings.loss == "full",
            one.need_bytes,
            one.token_s,
        ),
    )


def waits(settings: Settings) -> bool:
    """Whether shards, or weights of layers, wait on the host."""
    return settings.shard_offload != "none" or settings.weights_offload


def num_moved(one: Priced) -> int:
    """Strategies that lean on the bus and on host memory, which other programs use too."""
    settings = one.settings
    return sum(
        (
            settings.offload != "none",
            settings.optimizer_offload,
            settings.shard_offload != "none",
            settings.weights_offload,
            settings.adapters_offload,
            settings.device == "cuda" and OPTIMIZERS[settings.optimizer].is_paged,
        )
    )


def frontier(priced: Iterable[Priced]) -> list[Priced]:
    """Plans that none beats in both memory and time, the smallest first (Pareto)."""
    best: list[Priced] = []
    for one in sorted(priced, key=lambda one: (one.need_bytes, one.token_s)):
        if not best or one.token_s < best[-1].token_s:
            best.append(one)
    return best
