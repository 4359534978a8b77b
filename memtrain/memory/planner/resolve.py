"""From a recipe to a plan: every setting decided, priced and explained, or refused."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

from memtrain.errors import DataError, DoesNotFit, Fault, RecipeError
from memtrain.memory.estimate.host_memory import host_shortage
from memtrain.memory.estimate.pricing import (
    CountSteps,
    PlannerInputs,
    Priced,
    fits_host,
    host_need,
    predict,
    price,
)
from memtrain.memory.estimate.sharded.zero_buckets import bucket_of
from memtrain.memory.estimate.static import measured_beside
from memtrain.memory.explain.nothing_fits import NoPlan, nothing_fits
from memtrain.memory.explain.reasons import explain, explain_headroom
from memtrain.memory.generation.generation import with_generation
from memtrain.memory.generation.vllm import leaves_room, refuse_vllm, training_budget
from memtrain.memory.hardware.peak_history import kind_of_run
from memtrain.memory.plan.engine_kinds import uses_zero
from memtrain.memory.plan.length_profile import LengthProfile
from memtrain.memory.plan.plan import Decision, Prediction
from memtrain.memory.plan.settings import Settings
from memtrain.memory.planner.context_parallel_auto import by_context, with_reason
from memtrain.memory.planner.loss_tile import explain_tile, with_larger_tile, with_small_tiles
from memtrain.memory.planner.search import ENGINE_TIE, Space, fastest, num_moved, price_all, space, waits
from memtrain.memory.planner.use_and_never import with_use_and_never
from memtrain.memory.rules.base_settings import decide_base
from memtrain.memory.rules.engines import decide_layout, decide_loading, refuse_closed
from memtrain.memory.rules.ledger import DecisionLog, SourcedRecipe
from memtrain.memory.rules.oom_recovery import decide_preflight, decide_recovery, in_backward_choices
from memtrain.memory.rules.step_graphs import decide_step_graphs
from memtrain.memory.rules.weights_offload import can_move, moved
from memtrain.memory.strategies.base import StrategyContext
from memtrain.memory.strategies.exclusions import excluded
from memtrain.memory.strategies.registry import STRATEGIES, open_recovery, wish_of, without_strategies
from memtrain.recipes.edit import with_key

LENGTH_STEP = 64
"""Lengths are searched in steps that tensor cores like."""

__all__ = ["CountSteps", "PlannerInputs", "Resolved", "longest_that_fits", "open_space", "plain", "resolve"]


@dataclass(frozen=True, slots=True)
class Resolved:
    """The answer."""

    settings: Settings
    decisions: tuple[Decision, ...]
    prediction: Prediction
    plain: Prediction
    chosen: Priced
    """The plan with its time, before who writes completions was decided."""
    case: StrategyContext
    """The recipe, with `memory.use` and `memory.never` expressed by their keys; and the facts."""
    tried: tuple[Priced, ...]
    """Every plan that was weighed against it, fitting or not."""


def resolve(asked: SourcedRecipe, facts: PlannerInputs) -> Resolved:
    """The settings of a run that fits, with the reason of each: the fastest plan, exact ones first.

    Raises: RecipeError with every refusal; DoesNotFit, with ways out, when no choice that is left open fits.
    """
    try:
        return resolved_if_it_fits(asked, facts)
    except NoPlan as found:
        raise nothing_fits(found, _planned) from None


def resolved_if_it_fits(asked: SourcedRecipe, facts: PlannerInputs) -> Resolved:
    """The same; where nothing fits no ways out are looked for, which takes longer than to plan.

    Raises: RecipeError, DoesNotFit.
    """
    if asked.recipe.cluster.context_parallel != "auto":
        return _resolve(asked, facts)
    found, words, tried = by_context(asked, facts, _resolve)
    decisions = with_reason(found.decisions, found.settings.context_parallel, words)
    return replace(found, decisions=decisions, tried=tried)


def _resolve(asked: SourcedRecipe, facts: PlannerInputs) -> Resolved:
    """The same for a given number of processes that hold a row together."""
    ledger, case, choices = open_space(asked, facts)
    facts = case.facts
    budget = training_budget(case.recipe, facts, choices.groups[0][0])
    try:
        chosen, tried = _choose(choices, budget, case)
    except DoesNotFit:
        shorter = longest_that_fits(asked, facts) if "shorter_sequences" in case.recipe.memory.allow else None
        if shorter is None:
            raise
        return shorter
    away = replace(chosen, settings=moved(chosen.settings))
    recovery = decide_recovery(
        ledger,
        chosen.settings,
        open_recovery(ledger.asked),
        can_move_weights=can_move(case.recipe, facts.config, chosen.settings) and fits_host(away, facts),
    )
    decide_layout(ledger, chosen.settings)
    settings = chosen.settings.model_copy(
        update={
            "recovery": recovery,
            "preflight": decide_preflight(ledger, chosen.settings),
            "zero_bucket": bucket_of(facts.shape) if uses_zero(chosen.settings) else 0,
        }
    )
    chosen = replace(chosen, settings=settings)
    decide_loading(ledger, settings)
    explain(ledger, chosen, facts, budget)
    explain_tile(ledger, chosen)
    alike = [one for one in tried if waits(one.settings) == waits(chosen.settings)]
    roomy = [one for one in alike if leaves_room(case.recipe, case.facts, one)]
    free = int(budget * (1 - case.recipe.memory.headroom))
    fullest, freer = (fastest(roomy, most, case.facts) for most in (budget, free))
    moves_more = freer is not None and num_moved(freer) > num_moved(chosen)
    explain_headroom(ledger, chosen, fullest, freer, budget, moves_more=moves_more)
    # The gradients of a step of one micro-batch stay too; the host's launches are gone.
    captured = price(settings.model_copy(update={"step_graphs": True}), facts)
    if decide_step_graphs(ledger, settings, facts.shape, facts.config, max(0, captured.need_bytes - budget)):
        settings, chosen = captured.settings, captured
    ledger.raise_refusals()
    settings, prediction = with_generation(ledger, settings, chosen.prediction, facts, budget)
    return Resolved(
        settings=settings,
        decisions=tuple(ledger.decisions),
        prediction=prediction.model_copy(
            update={"budget_bytes": budget, "kind": kind_of_run(settings, facts.shape, facts.method)}
        ),
        plain=_plainly(settings, facts).model_copy(update={"budget_bytes": budget}),
        chosen=chosen,
        case=case,
        tried=tuple(tried),
    )


def open_space(asked: SourcedRecipe, facts: PlannerInputs) -> tuple[DecisionLog, StrategyContext, Space]:
    """Settings decided by rule, the complete request, and every plan that is left open.

    Raises: RecipeError with every refusal.
    """
    asked = with_use_and_never(asked)
    case = StrategyContext(asked, facts)
    ledger = DecisionLog(asked, facts.presumed)
    base, micro_batches = decide_base(ledger, facts)
    _refuse_used(ledger, case)
    if base is None:
        ledger.raise_refusals()
    assert base is not None, "A refusal was not noted."
    base = base.model_copy(update={"beside_bytes": measured_beside(base, facts.hardware.measured)})
    refuse_closed(ledger, base)
    refuse_vllm(ledger, base)
    wholes = in_backward_choices(ledger, (base.batch_size, base.batch_tokens), base.num_processes)
    ledger.raise_refusals()
    choices = space(base, case, micro_batches, wholes)
    if not choices.groups:
        raise _excludes_all(case, base)
    measured = facts.with_measured_layers(chain.from_iterable(choices.groups))
    return ledger, StrategyContext(asked, measured), choices


def longest_that_fits(asked: SourcedRecipe, facts: PlannerInputs, most: int | None = None) -> Resolved | None:
    """The plan for the longest `length.max_length`, in steps of 64, that fits; None where none does.

    `most`: the longest to try; the recipe's own where it is not given.
    """
    most = most or asked.recipe.length.max_length
    if facts.at_length is None or most is None:
        return None
    others = tuple(name for name in asked.recipe.memory.allow if name != "shorter_sequences")
    recipe = with_key(asked.recipe, "memory.allow", others)
    best: Resolved | None = None
    low, high = 0, most // LENGTH_STEP
    while low < high:
        middle = (low + high + 1) // 2
        length = middle * LENGTH_STEP
        try:
            shorter = SourcedRecipe(with_key(recipe, "length.max_length", length), asked.where)
            best = resolved_if_it_fits(shorter, facts.at_length(length))
            low = middle
        except DoesNotFit:
            high = middle - 1
        except DataError:  # No row is that short: what fits is longer, if there is anything.
            low = middle
    return best


def _plainly(settings: Settings, facts: PlannerInputs) -> Prediction:
    """The peaks of the run without any memory strategy; layers under other kernels are measured apart."""
    bare = plain(settings, facts.profile)
    is_alike = (bare.kernels, bare.liger) == (settings.kernels, settings.liger)
    return predict(bare, facts if is_alike else facts.with_measured_layers([bare]))


def plain(settings: Settings, profile: LengthProfile) -> Settings:
    """The same run without any memory strategy: see `without_strategies`.

    As many examples in a step and in a micro-batch as the planned run has on average: a packed sequence holds
    several.
    """
    per_sequence = profile.report.pieces / max(1, profile.report.num_sequences)
    sequences = min(settings.micro_batch_size, profile.report.num_sequences)
    if settings.micro_tokens is not None:
        sequences = min(sequences, max(1, int(settings.micro_tokens / profile.mean_tokens)))
    rows = None if settings.batch_size is None else round(settings.batch_size * per_sequence)
    micro_batch_size = max(1, round(sequences * per_sequence))
    return without_strategies(settings).model_copy(
        update={"batch_size": rows, "micro_batch_size": micro_batch_size, "micro_tokens": None}
    )


def _choose(choices: Space, budget: int, case: StrategyContext) -> tuple[Priced, list[Priced]]:
    """(the plan, all ranked plans): exact plans, then plans that step in the backward pass, then others.

    Raises: DoesNotFit when none fits the device, or none of those that do fits the host.
    """
    tried: list[Priced] = []
    chosen = _first_that_fits(choices, budget, case, tried)
    if chosen is not None:
        return chosen, tried
    smallest = min(tried, key=lambda one: one.need_bytes)
    if smallest.need_bytes > budget:
        raise NoPlan(smallest, budget, case.asked, case.facts)
    on_host = [(one, host_need(one, case.facts)) for one in tried if one.need_bytes <= budget]
    spared, least = min(on_host, key=lambda found: sum(found[1].values()))
    shortage = host_shortage(least, case.facts.hardware)
    if shortage is not None:
        if num_moved(spared) == 0:
            raise shortage
        beyond = [one for one in tried if one.need_bytes > budget and not one.settings.weights_offload]
        closest = min(beyond or [smallest], key=lambda one: one.need_bytes)
        raise NoPlan(closest, budget, case.asked, case.facts, shortage)
    # vLLM has no room beside any plan: what decides its memory says so.
    return smallest, tried


def _first_that_fits(
    choices: Space, budget: int, case: StrategyContext, tried: list[Priced]
) -> Priced | None:
    """The fastest plan of the first group that has one; `tried` gets all that were weighed.

    Where that plan leans on the bus, weights that wait on the host are weighed beside it.
    """
    headroom = case.recipe.memory.headroom

    def fastest_of(group: tuple[Settings, ...]) -> Priced | None:
        priced = price_all(group, case.facts)
        priced += with_small_tiles(priced, case.facts, budget, case.recipe)
        tried.extend(priced)
        roomy = [one for one in priced if leaves_room(case.recipe, case.facts, one)]
        return fastest(roomy, budget, case.facts, headroom)

    for group in choices.groups:
        chosen = fastest_of(group)
        if chosen is None:
            continue
        if choices.waiting and num_moved(chosen) and group in (choices.exact, choices.stepping):
            other = fastest_of(choices.waiting)
            if other is not None and other.token_s * (1 + ENGINE_TIE) < chosen.token_s:
                chosen = other
        if case.recipe.memory.loss_chunk_size == "auto":
            has_room = partial(leaves_room, case.recipe, case.facts)
            free = int(budget * (1 - headroom))
            most = free if chosen.need_bytes <= free else budget
            chosen = with_larger_tile(chosen, case.facts, most, has_room)
        return chosen
    return None


def _planned(asked: SourcedRecipe, facts: PlannerInputs) -> Priced | None:
    """The plan of a run, where a plan fits and nothing is refused."""
    if asked.recipe.cluster.context_parallel == "auto":
        asked = SourcedRecipe(with_key(asked.recipe, "cluster.context_parallel", 1), asked.where)
    try:
        _, case, choices = open_space(asked, facts)
    except RecipeError:
        return None
    budget = training_budget(case.recipe, facts, choices.groups[0][0])
    return _first_that_fits(choices, budget, case, [])


def _refuse_used(ledger: DecisionLog, case: StrategyContext) -> None:
    """Refuse what `memory.use` names and cannot be used here."""
    for name in case.recipe.memory.use:
        reason = STRATEGIES[name].refusal(case)
        if reason is not None:
            ledger.refuse(f"memory.use names {name}: {reason}", "memory.use", f"remove {name}")


def _excludes_all(case: StrategyContext, base: Settings) -> RecipeError:
    """The fault of choices that exclude each other whatever else is chosen."""
    memory = case.recipe.memory
    settings = base
    asked = [name for name, one in STRATEGIES.items() if wish_of(one, case) == "on"]
    for name in asked:
        for updates in STRATEGIES[name].changes(settings, case)[:1]:
            settings = settings.model_copy(update=dict(updates))
    if memory.activation_offloading == "on" and memory.activation_checkpointing == "off":
        settings = settings.model_copy(update={"offload": "all"})
    pair = excluded(settings)
    if pair is not None:
        what = f"{pair.strategy} cannot be combined with {pair.other.replace('_', ' ')}: {pair.reason}"
        key = "memory.use"
        if pair.strategy not in memory.use:
            key = next(iter(STRATEGIES[pair.strategy].use_keys(case.recipe)), key)
        return RecipeError([Fault(what, case.asked.where(key), "remove one of them")])
    names = ", ".join(memory.use) or "the keys of memory:"
    return RecipeError(
        [
            Fault(
                f"no plan uses all of {names}",
                case.asked.where("memory.use"),
                "remove one of them, or the entry of memory.never",
            )
        ]
    )
