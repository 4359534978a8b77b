"""The search over many recipes and budgets: what fits keeps its margin, more memory never hurts."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from sampled import sampled

from memtrain.errors import DoesNotFit
from memtrain.memory.estimate.pricing import MARGIN_BYTES, MARGIN_SHARE, PlannerInputs, Priced, price
from memtrain.memory.estimate.static import needed
from memtrain.memory.explain.nothing_fits import nearest_ways
from memtrain.memory.explain.reasons import gains, left_out, time_words
from memtrain.memory.hardware.devices import Hardware
from memtrain.memory.model_shape.known_models import known_config
from memtrain.memory.plan.units import GIB, gib
from memtrain.memory.planner.pinned_recipe import pins, yaml_lines
from memtrain.memory.planner.resolve import Resolved, longest_that_fits, resolved_if_it_fits
from memtrain.memory.planner.search import TIE, fastest, frontier
from memtrain.memory.strategies.exclusions import excluded
from memtrain.memory.strategies.registry import STRATEGIES

Ask = Callable[..., Resolved]
MODELS = ("qwen3-0.6b", "llama-3.2-1b", "qwen3-4b", "llama-3.1-8b", "qwen3-32b", "llama-3.3-70b")
FORMS: tuple[dict[str, Any], ...] = (
    {},
    {"model__adapter": {"r": 16}},
    {"model__adapter": {"r": 64}, "model__quantize": "4bit"},
    {"optim__kind": "adafactor", "optim__max_grad_norm": None},
    {"optim__master_weights": False},
    {"memory__activation_checkpointing": "on", "memory__loss": "full"},
    {"memory__allow": ("lora", "qlora", "adamw_8bit"), "train__batch_tokens": 32_768},
    {"length__padding_free": False, "train__batch_size": 8},
    {"optim__kind": "muon", "length__packing": "bfd"},
    {"memory__activation_offloading": "on", "memory__never": "optimizer_offload"},
)
SWEEP = list(itertools.product(MODELS, FORMS))
BUDGETS = (24, 48, 80, 141)


def facts(
    facts_of: Callable[..., PlannerInputs], profile_of: Callable[..., Any], model: str
) -> PlannerInputs:
    config = known_config(model)
    assert config is not None
    lengths = profile_of(*[2048] * 100, *[700] * 200, *[200] * 300)
    return facts_of(Hardware.named("h200"), lengths, dict(config), presumed=frozenset({"bitsandbytes"}))


def tier(resolved: Resolved) -> tuple[int, bool]:
    """Changes of what is learned, and whether the step is made in the backward pass."""
    said = resolved.case.recipe
    own = {name for name in STRATEGIES if STRATEGIES[name].wish(said) == "on"} | {"master_weights"}
    used = {name for name, one in STRATEGIES.items() if one.is_used(resolved.settings) and not one.is_exact}
    return len(used - own), resolved.settings.in_backward


@pytest.mark.parametrize(("model", "said"), sampled(SWEEP, 3), ids=lambda value: str(value)[:60])
def test_more_memory_never_gives_a_slower_plan_and_what_fits_keeps_its_margin(
    ask: Ask, facts_of: Any, profile_of: Any, model: str, said: dict[str, Any]
):
    """Over six models, ten forms of a recipe and four budgets. Plans within 3 % count as equally fast."""
    known = facts(facts_of, profile_of, model)
    fitted: dict[tuple[int, bool], list[float]] = {}
    for budget in BUDGETS:
        try:
            full = {"memory__budget": f"{budget}GiB", "memory__headroom": 0}
            resolved = ask(known, resolved_if_it_fits, **said, **full)
        except DoesNotFit:
            assert not fitted, "a smaller budget was enough"
            continue
        need = needed(resolved.prediction.peak.num_bytes, resolved.settings)
        assert need * (1 + MARGIN_SHARE) + MARGIN_BYTES <= budget * GIB + 1
        assert excluded(resolved.settings) is None
        fitted.setdefault(tier(resolved), []).append(resolved.chosen.token_s)
    for times in fitted.values():
        assert all(later <= earlier * (1 + TIE) for earlier, later in itertools.pairwise(times))
    tiers = list(fitted)
    assert tiers == sorted(tiers, reverse=True), "more memory changed more of what is learnt"


def test_nothing_that_was_weighed_and_fits_is_faster_than_the_plan(ask: Ask, facts_of: Any, profile_of: Any):
    known = facts(facts_of, profile_of, "llama-3.1-8b")
    resolved = ask(known, memory__budget="100GiB", memory__headroom=0)
    fitting = [one for one in resolved.tried if one.need_bytes <= 100 * GIB]
    assert len(resolved.tried) > 50
    assert resolved.chosen.token_s <= min(one.token_s for one in fitting) * (1 + TIE)


def test_of_equally_fast_plans_the_smaller_is_taken_and_of_those_the_one_that_moves_nothing(
    ask: Ask, facts_of: Any, profile_of: Any
):
    known = facts(facts_of, profile_of, "qwen3-0.6b")
    plan = ask(known).chosen

    def like(need_gib: float, token_s: float, **settings: Any) -> Priced:
        changed = plan.settings.model_copy(update=settings)
        return Priced(changed, plan.prediction, int(need_gib * GIB), token_s, token_s)

    small, large, slow = like(10, 1.02), like(20, 1.0), like(5, 1.5)
    assert fastest([large, small, slow], 40 * GIB, known) is small
    assert fastest([large, small, slow], 8 * GIB, known) is slow
    assert fastest([large, small, slow], 4 * GIB, known) is None
    moved = like(5, 1.0, optimizer_offload=True)
    assert fastest([moved, small], 40 * GIB, known) is small


def test_a_plan_with_room_goes_before_a_faster_one_that_fills_the_card(
    ask: Ask, facts_of: Any, profile_of: Any
):
    known = facts(facts_of, profile_of, "qwen3-0.6b")
    plan = ask(known).chosen

    def like(need_gib: float, token_s: float, **settings: Any) -> Priced:
        changed = plan.settings.model_copy(update=settings)
        return Priced(changed, plan.prediction, int(need_gib * GIB), token_s, token_s)

    full, roomy, slow = like(79.6, 1.0), like(46.9, 1.08), like(40, 1.2)
    assert fastest([full, roomy, slow], 80 * GIB, known, headroom=0.05) is roomy
    assert fastest([full, roomy, slow], 80 * GIB, known) is full
    assert fastest([full, slow], 80 * GIB, known, headroom=0.05) is full
    assert fastest([full, like(46.9, 1.08, optimizer_offload=True)], 80 * GIB, known, headroom=0.05) is full


def test_a_plan_that_leaves_room_says_what_the_fullest_would_need(ask: Ask, facts_of: Any, profile_of: Any):
    known = facts(facts_of, profile_of, "qwen3-0.6b")
    fullest = ask(known, memory__headroom=0).chosen
    budget = round(fullest.need_bytes / GIB * 1.01, 2)
    said = {"memory__budget": f"{budget}GiB"}
    resolved = ask(known, **said)
    reported = {one.setting: one for one in resolved.decisions}
    assert resolved.chosen.need_bytes <= 0.95 * budget * GIB
    assert resolved.chosen.token_s < 1.1 * fullest.token_s
    assert gib(fullest.need_bytes) in reported["headroom"].reason


def test_a_sixth_of_the_layers_is_checkpointed_where_that_leaves_room(
    ask: Ask, facts_of: Any, profile_of: Any
):
    config = known_config("qwen3-8b")
    assert config is not None
    known = facts_of(Hardware.named("a100-40"), profile_of(*[4096] * 64), dict(config))
    lora = {"model__adapter": {"kind": "lora"}, "train__batch_size": 16}
    assert ask(known, **lora, memory__headroom=0).settings.checkpoint_every == 0
    resolved = ask(known, **lora)
    assert resolved.settings.checkpoint_every == 6
    assert resolved.chosen.need_bytes <= 0.95 * known.hardware.memory_bytes


def test_headroom_that_costs_too_much_is_not_left_and_the_plan_says_so(
    ask: Ask, facts_of: Any, profile_of: Any
):
    known = facts(facts_of, profile_of, "qwen3-0.6b")
    fullest = ask(known, memory__headroom=0).chosen
    budget = f"{fullest.need_bytes / GIB * 1.01:.2f}GiB"
    resolved = ask(known, memory__budget=budget, memory__headroom=0.4)
    reason = next(one.reason for one in resolved.decisions if one.setting == "headroom")
    assert resolved.chosen.need_bytes > 0.6 * float(budget[:-3]) * GIB
    assert "not kept free: the fastest plan that does needs" in reason


@pytest.mark.parametrize("layout", ["auto", "full"])
def test_every_plan_is_priced_with_the_layout_of_its_checkpoints(ask, facts_of, profile_of, layout: str):
    known = facts_of(Hardware.named("h100", 8), profile_of(*[512] * 64))
    weighed = [one.settings for one in ask(known, train__batch_size=16, save__layout=layout).tried]
    assert {one.engine for one in weighed} > {"ddp"}
    for one in weighed:
        is_shared = one.engine != "ddp" and layout == "auto"
        assert one.checkpoint_layout == ("sharded" if is_shared else "full")


def test_the_frontier_holds_what_nothing_beats_in_both():
    plan: Any = object()

    def at(need: int, token_s: float) -> Priced:
        return Priced(plan, plan, need, token_s, token_s)

    a, b, c, d = at(1, 3.0), at(2, 2.0), at(3, 2.5), at(4, 1.0)
    assert frontier([d, c, b, a]) == [a, b, d]


def test_each_strategy_of_a_plan_tells_the_run_without_it(ask: Ask, facts_of: Any, profile_of: Any):
    resolved = ask(facts(facts_of, profile_of, "llama-3.1-8b"), memory__budget="100GiB")
    reported = {one.strategy: one for one in gains(resolved.chosen, resolved.case.facts)}
    assert "chunked_loss" in reported
    full = price(
        resolved.settings.model_copy(update={"loss": "full"}), resolved.case.facts
    ).prediction.peak.num_bytes
    assert reported["chunked_loss"].peak_bytes == full


def test_all_weights_of_8b_with_copies_fit_where_copies_wait_on_the_host(
    ask: Ask, facts_of: Any, profile_of: Any
):
    """72 GiB hold weights (15), float32 gradients (30) and a step; with the copies (30) there too, not."""
    known = facts(facts_of, profile_of, "llama-3.1-8b")
    resolved = ask(known, memory__budget="72GiB")
    assert resolved.settings.master_weights
    assert resolved.settings.optimizer_offload
    assert not resolved.settings.in_backward
    never = ("optimizer_offload", "weights_offload")
    with pytest.raises(DoesNotFit):
        ask(known, memory__budget="72GiB", memory__never=never, optim__in_backward="off")


def test_every_strategy_that_is_not_used_has_a_reason(ask: Ask, facts_of: Any, profile_of: Any):
    resolved = ask(facts(facts_of, profile_of, "llama-3.1-8b"), memory__never="full_offloading")
    reasons = {one.strategy: one.reason for one in left_out(resolved.chosen, resolved.case)}
    used = {name for name, one in STRATEGIES.items() if one.is_used(resolved.settings)}
    assert set(reasons) == set(STRATEGIES) - used
    assert all(reasons.values())
    assert reasons["full_offloading"].startswith("ruled out by memory.never (r.yaml:memory.never)")
    assert "max_grad_norm" in reasons["optimizer_in_backward"]
    assert reasons["lora"].startswith("changes the result of training; memory.allow: [lora] permits it: peak")


def test_times_are_reported_in_words():
    assert time_words(1.004) == "as fast"
    assert time_words(1.25) == "25% slower"
    assert time_words(0.8) == "20% faster"


def test_the_pinned_plan_is_the_same_plan(ask: Ask, facts_of: Any, profile_of: Any):
    known = facts(facts_of, profile_of, "qwen3-4b")
    resolved = ask(known, memory__budget="50GiB")
    keys = pins(resolved.case.asked, resolved.settings)
    said = {key.replace(".", "__"): value for key, value in keys.items()}
    again = ask(known, memory__budget="50GiB", **said)
    # What is pinned to be off is no way to go on when memory runs out.
    assert again.settings.model_copy(update={"recovery": resolved.settings.recovery}) == resolved.settings
    assert pins(again.case.asked, again.settings) == {}
    lines = yaml_lines({"memory.loss": "full", "train.micro_batch_size": 2, "memory.offload": True})
    assert lines == ["memory:", "  loss: full", "  offload: true", "train:", "  micro_batch_size: 2"]


def test_where_nothing_fits_three_ways_out_are_reported_with_their_peaks_and_they_fit(
    ask: Ask, facts_of: Any, profile_of: Any
):
    known = facts(facts_of, profile_of, "llama-3.1-8b")
    with pytest.raises(DoesNotFit) as caught:
        ask(known, memory__budget="24GiB", memory__never="weights_offload")
    fault = caught.value.faults[0]
    assert "no plan fits 24.00 GiB" in fault.what
    assert "weights 14.96 GiB" in fault.what
    assert "{kind: lora}" in fault.fix
    assert "GPUs with cluster.engine: fsdp2 (peak " in fault.fix
    known = replace(known, hardware=Hardware.named("b200"))
    roomy = ask(known, memory__budget="170GiB", memory__never=("optimizer_offload", "weights_offload"))
    smallest = min(roomy.tried, key=lambda one: one.need_bytes)
    ways = nearest_ways(smallest, 45 * GIB, known)
    assert len(ways) == 3
    assert all(way.peak_bytes < 45 * GIB for way in ways)


def test_the_longest_length_that_fits_is_found_and_taken_where_shorter_rows_are_allowed(
    ask: Ask, facts_of: Any, profile_of: Any
):
    """Every sequence as long as it may be: the next step of 64 tokens must not fit."""
    config = known_config("qwen3-0.6b")
    assert config is not None

    def at(length: int) -> PlannerInputs:
        return facts_of(Hardware.named("h100"), profile_of(*[length] * 32), dict(config), at_length=at)

    never = ("optimizer_offload", "weights_offload")
    tight = {"memory__budget": "12GiB", "memory__never": never, "length__max_length": 65_536}
    with pytest.raises(DoesNotFit):
        ask(at(65_536), **tight)
    resolved = ask(at(65_536), **tight, memory__allow="shorter_sequences")
    found = resolved.case.recipe.length.max_length
    assert found is not None
    assert found % 64 == 0
    assert resolved.settings.max_length == found
    with pytest.raises(DoesNotFit):
        ask(at(found + 64), **(tight | {"length__max_length": found + 64}))
    assert longest_that_fits(resolved.case.asked, at(found), 64) is not None
