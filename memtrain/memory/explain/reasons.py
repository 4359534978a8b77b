"""Reasons of a plan: memory and time that each strategy buys, and why the others are left out."""

from __future__ import annotations

from dataclasses import dataclass

from memtrain.memory.estimate.pricing import PlannerInputs, Priced, budget_of, price
from memtrain.memory.plan.settings import Settings
from memtrain.memory.plan.units import count_of, gib
from memtrain.memory.rules.batching import Micro, worked_line
from memtrain.memory.rules.context_parallel import explain_sharing, held_by
from memtrain.memory.rules.engines import layout_of, open_forms
from memtrain.memory.rules.ledger import DecisionLog
from memtrain.memory.rules.precision import WITH_COPIES, explain_masters
from memtrain.memory.rules.reference_model import explain_reference
from memtrain.memory.strategies.base import Strategy, StrategyContext, Updates
from memtrain.memory.strategies.exclusions import excluded
from memtrain.memory.strategies.registry import STRATEGIES, is_searched, used_in, wish_of

EQUAL = 0.01
"""Times that differ by less are reported as equal."""


@dataclass(frozen=True, slots=True)
class Gain:
    """Effect of a strategy of the plan: the same run without it."""

    strategy: str
    peak_bytes: int
    """Live tensors at the highest peak without it."""
    need_bytes: int
    time_share: float
    """Time of a token without it, over the plan's."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A strategy that the plan does not use."""

    strategy: str
    reason: str


def gains(chosen: Priced, facts: PlannerInputs) -> tuple[Gain, ...]:
    """Effect of each strategy that can be taken away alone."""
    found: list[Gain] = []
    for strategy in used_in(chosen.settings):
        if not strategy.without:
            continue
        other = _changed(chosen, strategy.without, facts)
        share = other.token_s / chosen.token_s
        found.append(Gain(strategy.name, other.prediction.peak.num_bytes, other.need_bytes, share))
    return tuple(found)


def left_out(chosen: Priced, case: StrategyContext) -> tuple[LeftOut, ...]:
    """Every strategy that the plan does not use, with the reason."""
    used = {strategy.name for strategy in used_in(chosen.settings)}
    return tuple(
        LeftOut(strategy.name, _reason(strategy, chosen, case))
        for strategy in STRATEGIES.values()
        if strategy.name not in used
    )


def _reason(strategy: Strategy, chosen: Priced, case: StrategyContext) -> str:
    asked, memory = case.asked, case.recipe.memory
    if strategy.name in memory.never:
        return f"ruled out by memory.never ({asked.where('memory.never')})"
    refused = strategy.refusal(case)
    if refused is not None:
        return refused
    if strategy.name == "shorter_sequences":
        return (
            "not needed"
            if strategy.name in memory.allow
            else "changes the result of training, and is not allowed"
        )
    wish = wish_of(strategy, case)
    priced = _with(strategy, chosen, case)
    if wish == "off" and strategy.wish(case.recipe) == "allow":
        difference = f": {_against(priced, chosen)}" if isinstance(priced, Priced) else ""
        return f"changes the result of training; memory.allow: [{strategy.name}] permits it{difference}"
    if wish == "off":
        set_keys = [key for key in strategy.use_keys(case.recipe) if asked.is_set(key)]
        return f"ruled out by {set_keys[0]} ({asked.where(set_keys[0])})" if set_keys else "not asked for"
    if isinstance(priced, str):
        return priced
    if priced is None:
        return "another strategy is used in its place"
    fits = priced.need_bytes <= budget_of(case.recipe, case.facts.hardware)
    return f"{'not needed' if fits else 'does not fit'}: {_against(priced, chosen)}"


def _with(strategy: Strategy, chosen: Priced, case: StrategyContext) -> Priced | str | None:
    """The plan with a strategy added; why that cannot be; or None where it is not a change of the plan."""
    if not is_searched(strategy):
        return None
    for update in strategy.changes(chosen.settings, case):
        settings = chosen.settings.model_copy(update=update)
        broken = excluded(settings)
        return broken.reason if broken is not None else price(settings, case.facts)
    return None


def _against(other: Priced, chosen: Priced) -> str:
    return f"peak {gib(other.prediction.peak.num_bytes)}, {time_words(other.token_s / chosen.token_s)}"


def time_words(share: float) -> str:
    """A time over another in words: `23 % slower`, `as fast` within the prediction's error."""
    if abs(share - 1) < EQUAL:
        return "as fast"
    return f"{share - 1:.0%} slower" if share > 1 else f"{1 - share:.0%} faster"


def explain_headroom(
    ledger: DecisionLog,
    chosen: Priced,
    fullest: Priced | None,
    roomy: Priced | None,
    budget: int,
    *,
    moves_more: bool,
) -> None:
    """Note that a faster plan was left for one with room, where it was; or that no room is left, and why.

    `roomy`: the fastest plan that leaves `memory.headroom` of the budget free. `moves_more`: it keeps more on
    the host than the chosen one.
    """
    headroom = ledger.asked.recipe.memory.headroom
    if chosen.need_bytes > budget * (1 - headroom):
        words = "not kept free: no plan does that"
        if roomy is not None:
            slower = time_words(roomy.token_s / chosen.token_s)
            words = f"not kept free: the fastest plan that does needs {gib(roomy.need_bytes)}, {slower}"
            words += ", and moves more to the host" if moves_more else ""
        ledger.decide("headroom", f"{headroom:.0%}", words, "memory.headroom")
    elif fullest is not None and fullest.need_bytes > chosen.need_bytes:
        faster = time_words(fullest.token_s / chosen.token_s)
        words = f"the fastest plan needs {gib(fullest.need_bytes)}, {faster}"
        ledger.decide("headroom", f"{headroom:.0%}", words, "memory.headroom")


def explain(ledger: DecisionLog, chosen: Priced, facts: PlannerInputs, budget: int) -> None:
    """Note the decisions that depend on memory, each with its gain."""
    settings = chosen.settings

    def gain(without: Updates) -> str:
        return _gain_words(chosen, without, facts)

    if settings.num_processes > 1:
        whole = {"engine": "ddp", "shard_offload": "none", "checkpoint_layout": "full"}
        words = gain(whole) if settings.engine != "ddp" else ""
        others = [form.engine for form in open_forms(ledger.asked.recipe, settings, facts.has)]
        if settings.engine == "ddp" and "fsdp2" in others:
            layout = layout_of(ledger.asked.recipe, settings.model_copy(update={"engine": "fsdp2"}))
            words = _price_of(chosen, {"engine": "fsdp2", "checkpoint_layout": layout}, facts)
        ledger.decide("engine", settings.engine, words, "cluster.engine")
    if settings.shard_offload != "none":
        words = gain({"shard_offload": "none"})
        ledger.decide("shard_offload", settings.shard_offload, words, "cluster.cpu_offload")
    if settings.context_parallel > 1:
        explain_sharing(ledger, settings, gain(held_by(1)))
    micro_batch = Micro(settings.micro_batch_size, settings.micro_tokens)
    batch = (settings.batch_size, settings.batch_tokens)
    sharing = settings.context_parallel
    line = worked_line(batch, micro_batch, settings.num_replicas, facts.profile, num_sharing=sharing)
    rows = facts.profile.report.num_sequences
    if settings.batch_size is not None and settings.batch_size > rows and ledger.asked.recipe.online is None:
        words = f"more than the {count_of(rows, 'row')} there are: every step is all of them"
        ledger.decide_again("batch_size", settings.batch_size, words, "train.batch_size")
    path = "train.micro_tokens" if settings.micro_tokens is not None else "train.micro_batch_size"
    ledger.decide("micro_batch", settings.micro_tokens or settings.micro_batch_size, line, path)
    length = "length.packing" if settings.packing != "none" else "length.padding_free"
    flat = "rows of a micro-batch are concatenated; none attends to another" if settings.padding_free else ""
    ledger.decide("padding_free", settings.padding_free, flat or "rows are padded on the right", length)
    ledger.decide(
        "activation_checkpointing",
        f"every {settings.checkpoint_every}" if settings.checkpoint_every else "off",
        gain({"checkpoint_every": 0, "offload": "none"})
        if settings.checkpoint_every
        else "streamed layers keep only their inputs, and are recomputed in slices"
        if settings.slice_tokens
        else _price_of(chosen, {"checkpoint_every": 1}, facts),
        "memory.activation_checkpointing",
    )
    if settings.slice_tokens:
        ledger.decide(
            "streamed_layers",
            f"slices of {settings.slice_tokens:,} tokens",
            f"{gain({'slice_tokens': 0, 'checkpoint_every': 1})}{_drawn_by_slice(settings)}",
            "memory.streamed_layers",
        )
    if settings.weights_offload:
        value = "all" if settings.adapters_offload else "on"
        without = {"weights_offload": False, "adapters_offload": False}
        ledger.decide("weights_offload", value, gain(without), "memory.weights_offload")
    other_loss = {"loss": "full"} if settings.loss != "full" else {"loss": "chunked"}
    ledger.decide("loss", settings.loss, gain(other_loss), "memory.loss")
    _explain_offloading(ledger, settings, gain({"offload": "none", "offload_keep": 0}))
    _explain_optimizer(ledger, settings, chosen, facts)
    explain_reference(ledger, settings, gain)
    source = "memory.budget" if ledger.asked.is_set("memory.budget") else None
    ledger.decide("budget", gib(budget), f"free on {facts.hardware.name}" if not source else "", source)


def _drawn_by_slice(settings: Settings) -> str:
    """A run with other random numbers than the plain one is no less right, and is reported."""
    drops = settings.adapter is not None and settings.adapter.dropout
    return "; dropout draws its numbers slice by slice" if drops else ""


def _explain_offloading(ledger: DecisionLog, settings: Settings, gained: str) -> None:
    memory = ledger.asked.recipe.memory
    is_away = settings.offload != "none"
    if is_away:
        kept = f"; the last {settings.offload_keep} layers keep theirs" if settings.offload_keep else ""
        path = "memory.activation_offloading"
        ledger.decide("activation_offloading", settings.offload, f"{gained}{kept}", path)
    if memory.offload_disk is not None:
        limit = gib(memory.offload_host or 0)
        reason = (
            f"offloaded activations beyond {limit} of a process, the oldest first"
            if is_away
            else "not used: nothing is offloaded"
        )
        ledger.decide("offload_disk", memory.offload_disk, reason, "memory.offload_disk")


def _explain_optimizer(ledger: DecisionLog, settings: Settings, chosen: Priced, facts: PlannerInputs) -> None:
    recipe = ledger.asked.recipe
    gain = "" if settings.master_weights else _gain_words(chosen, WITH_COPIES, facts)
    explain_masters(ledger, settings, facts.config, gain)
    for name, off in (("copies", "float32"), ("compressed_moments", False)):
        if getattr(settings, name) != off:
            path = f"optim.{name}" if ledger.asked.is_set(f"optim.{name}") else "memory.allow"
            ledger.decide(name, getattr(settings, name), _gain_words(chosen, {name: off}, facts), path)
    if settings.in_backward:
        gain = _gain_words(chosen, {"in_backward": False}, facts)
        ledger.decide("in_backward", "on", gain, "optim.in_backward")
    if settings.optimizer_offload:
        gain = _gain_words(chosen, {"optimizer_offload": False}, facts)
        ledger.decide("optimizer_offload", "on", gain, "memory.optimizer_offload")
    if settings.optimizer != recipe.optim.kind:
        gain = _gain_words(chosen, {"optimizer": recipe.optim.kind}, facts)
        ledger.decide("optimizer", settings.optimizer, gain, "memory.allow")
    if settings.adapter != recipe.model.adapter or settings.quantize != recipe.model.quantize:
        without = {"adapter": recipe.model.adapter, "quantize": recipe.model.quantize}
        kind = "qlora" if settings.quantize != "none" else "lora"
        ledger.decide("adapter", kind, _gain_words(chosen, without, facts), "memory.allow")


def _changed(chosen: Priced, updates: Updates, facts: PlannerInputs) -> Priced:
    return price(chosen.settings.model_copy(update=updates), facts)


def _gain_words(chosen: Priced, without: Updates, facts: PlannerInputs) -> str:
    """Savings of a setting, as the peak and the time without it."""
    other = _changed(chosen, without, facts)
    if other.prediction == chosen.prediction and other.token_s == chosen.token_s:
        return ""
    peak, without_it = chosen.prediction.peak.num_bytes, other.prediction.peak.num_bytes
    return f"peak {gib(peak)}; {gib(without_it)} and {time_words(other.token_s / chosen.token_s)} without"


def _price_of(chosen: Priced, updates: Updates, facts: PlannerInputs) -> str:
    """Savings that a setting which is off would give."""
    return f"not needed; with it: {_against(_changed(chosen, updates, facts), chosen)}"
