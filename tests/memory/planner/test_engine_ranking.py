"""Which engine `auto` takes for models and devices of known size, and what it says of the others."""

from typing import Any

import pytest
from sampled import sampled

from memtrain.errors import RecipeError
from memtrain.memory.estimate.host_memory import host_bytes
from memtrain.memory.estimate.pricing import PlannerInputs, heaviest, price
from memtrain.memory.estimate.sharded.communication import communication_time, waiting_bytes
from memtrain.memory.hardware.devices import Hardware, cpu
from memtrain.memory.model_shape.known_models import known_config
from memtrain.memory.plan.units import GIB
from memtrain.memory.planner.engine_ranking import RankedEngine, form_words, rank_engines
from memtrain.memory.planner.pinned_recipe import pins
from memtrain.memory.planner.resolve import Resolved, open_space
from memtrain.memory.planner.search import ENGINE_TIE, TIE, fastest
from memtrain.memory.rules.engines import open_forms

DEEPSPEED = frozenset({"deepspeed"})
COPIES = {"optim__master_weights": True}
"""Float32 copies of bfloat16 weights: without them DeepSpeed would learn something else."""

SMALL_MICRO = COPIES | {"train__micro_tokens": 2048}


@pytest.fixture
def plan(ask, facts_of, profile_of):
    def made(
        model: str, card: str, count: int, presumed: frozenset[str] = DEEPSPEED, **said: Any
    ) -> Resolved:
        config = known_config(model)
        assert config is not None
        return ask(facts(card, count, config, presumed), **{"train__batch_size": 64} | said)

    def facts(card: str, count: int, config: Any, presumed: frozenset[str]) -> PlannerInputs:
        return facts_of(Hardware.named(card, count), profile_of(*[2048] * 64), config, presumed=presumed)

    return made


def weighed(made: Resolved) -> tuple[RankedEngine, ...]:
    _, case, choices = open_space(made.case.asked, made.case.facts)
    tried = [price(one, case.facts) for group in choices.groups for one in group]
    return rank_engines(made.chosen, tried, made.prediction.budget_bytes, made.case)


def reported(made: Resolved) -> dict[str, str]:
    return {one.name: one.words for one in weighed(made)}


SHAPES = [
    # All of it on every card: 16 bytes a weight are 10 GiB.
    ("Qwen/Qwen3-0.6B", "h100", 8, COPIES, "ddp", "none"),
    # Pure bfloat16 is 10 bytes a weight where gradients are summed in float32.
    ("Qwen/Qwen3-1.7B", "a100-40", 8, {"optim__master_weights": False}, "ddp", "none"),
    # 16 bytes a weight are 27 GiB; in shards of eight they are 3.4, and all travels behind the computing.
    ("Qwen/Qwen3-1.7B", "4090", 8, COPIES, "fsdp2", "none"),
    # Eight small micro-batches: weights that stay whole need not be gathered in each.
    ("meta-llama/Llama-3.1-8B", "h100", 8, SMALL_MICRO, "zero2", "none"),
    ("meta-llama/Llama-3.1-8B", "h100", 8, COPIES, "fsdp2", "none"),
    ("meta-llama/Llama-3.1-8B", "4090", 8, {}, "fsdp2", "none"),
    ("meta-llama/Llama-3.1-70B", "h100", 8, {"optim__master_weights": False}, "fsdp2", "none"),
    # 16 bytes a weight in shards of eight are 131 GiB: copies and moments wait on the host.
    ("meta-llama/Llama-3.1-70B", "h100", 8, {}, "fsdp2", "none"),
    ("meta-llama/Llama-3.1-70B", "h100", 16, COPIES, "fsdp2", "none"),
    # 16 bytes a weight in shards of eight are 131 GiB: only what waits on the host leaves room.
    (
        *("meta-llama/Llama-3.1-70B", "a100-40", 8),
        {"memory__never": "optimizer_offload", "cluster__engine": "fsdp2"},
        *("fsdp2", "parameters"),
    ),
]


@pytest.mark.parametrize(("model", "card", "count", "said", "engine", "offload"), sampled(SHAPES, 3))
def test_the_fastest_engine_that_fits_is_taken(plan, model, card, count, said, engine, offload, monkeypatch):
    monkeypatch.setattr("memtrain.memory.estimate.pricing.fits_host", lambda priced, facts: True)
    monkeypatch.setattr("memtrain.memory.planner.search.fits_host", lambda priced, facts: True)
    made = plan(model, card, count, **said, memory__headroom=0)
    assert (made.settings.engine, made.settings.shard_offload) == (engine, offload)
    words = reported(made)
    assert words[form_words(made.settings)] == "taken"
    if engine != "ddp" and "cluster__engine" not in said:
        assert words["ddp"] == "does not fit" or words["ddp"].endswith("slower")


def test_every_engine_is_weighed_with_what_may_wait_on_the_host(plan):
    made = plan("Qwen/Qwen3-1.7B", "h100", 8, model__dtype="float32")
    assert list(reported(made)) == [
        "ddp",
        "fsdp2",
        "fsdp2, parameters on the host",
        "zero1",
        "zero1, optimizer on the host",
        "zero2",
        "zero2, optimizer on the host",
        "zero3",
        "zero3, optimizer on the host",
        "zero3, parameters on the host",
    ]
    assert all(one.best is not None and one.best.step_s > 0 for one in weighed(made))


@pytest.mark.parametrize(
    ("presumed", "said", "words"),
    [
        (frozenset(), COPIES, "DeepSpeed is not installed (pip install 'memtrain[deepspeed]')"),
        (DEEPSPEED, {"optim__master_weights": False}, "optim.master_weights: leave it out"),
        (
            DEEPSPEED,
            COPIES | {"model__adapter": {"kind": "lora"}},
            "would round parts that are trained in float32",
        ),
        (DEEPSPEED, COPIES | {"cluster__context_parallel": 2}, "are untested with DeepSpeed's shards"),
    ],
)
def test_engines_that_are_not_weighed_are_reported_with_the_reason(
    plan, presumed, said, words: str, monkeypatch
):
    monkeypatch.setattr("memtrain.memory.rules.ledger.installed", lambda *names: frozenset())
    monkeypatch.setattr("memtrain.memory.estimate.pricing.installed", lambda *names: frozenset())
    if "model__adapter" in said:
        said = {key: value for key, value in said.items() if key not in COPIES}
    made = plan("Qwen/Qwen3-1.7B", "h100", 8, presumed, **said)
    assert not made.settings.engine.startswith("zero")
    reasons = reported(made)
    for engine in ("zero2", "zero3"):
        assert reasons[engine].startswith("not weighed: ")
        assert words in reasons[engine]


def test_stage_1_would_add_gradients_of_bfloat16_weights_in_bfloat16(plan):
    made = plan("Qwen/Qwen3-1.7B", "h100", 8)
    assert "adds gradients of bfloat16 weights in bfloat16" in reported(made)["zero1"]
    with pytest.raises(RecipeError, match="adds gradients of bfloat16") as caught:
        plan("Qwen/Qwen3-1.7B", "h100", 8, cluster__engine="zero1")
    assert "zero2" in caught.value.faults[0].fix


def test_an_engine_of_deepspeeds_is_refused_by_name_where_it_is_not_installed(plan, monkeypatch):
    monkeypatch.setattr("memtrain.memory.rules.ledger.installed", lambda *names: frozenset())
    with pytest.raises(RecipeError, match="needs DeepSpeed, which is not installed") as caught:
        plan("Qwen/Qwen3-1.7B", "h100", 8, frozenset(), cluster__engine="zero2", **COPIES)
    assert "memtrain[deepspeed]" in caught.value.faults[0].fix
    with pytest.raises(RecipeError, match="DeepSpeed is not installed"):
        plan("Qwen/Qwen3-1.7B", "h100", 8, frozenset(), cluster__cpu_offload="optimizer", **COPIES)


def test_what_waits_on_the_host_for_one_process_has_a_key_of_its_own(plan):
    with pytest.raises(RecipeError, match="this run has one process") as caught:
        plan("Qwen/Qwen3-1.7B", "h100", 1, cluster__cpu_offload="parameters")
    assert "memory.optimizer_offload" in caught.value.faults[0].fix


def test_the_choice_is_the_same_every_time_and_in_any_order(plan):
    made = plan("Qwen/Qwen3-1.7B", "4090", 8, **COPIES)
    again = plan("Qwen/Qwen3-1.7B", "4090", 8, **COPIES)
    assert (made.settings, made.decisions) == (again.settings, again.decisions)
    backwards = fastest(made.tried[::-1], made.prediction.budget_bytes, made.case.facts)
    assert backwards is not None
    assert form_words(backwards.settings) == form_words(made.settings)


def test_of_equally_fast_engines_the_simpler_one_is_taken(plan):
    """fsdp2 would need less on a card where whole weights fit, and is within what can be distinguished."""
    made = plan("Qwen/Qwen3-0.6B", "h100", 8)
    assert made.settings.engine == "ddp"
    shards = {"engine": "fsdp2", "loads_shards": True}
    other = price(made.chosen.settings.model_copy(update=shards), made.case.facts)
    assert other.need_bytes < made.chosen.need_bytes
    assert other.token_s < made.chosen.token_s * (1 + TIE)
    assert fastest([other, made.chosen], 80 * GIB, made.case.facts) == made.chosen


def test_a_simpler_engine_goes_before_one_that_is_a_little_faster(ask, facts_of, profile_of):
    """Two CPU processes with few rows a step: sharing out the optimizer's step saves a few percent."""
    known = facts_of(cpu(64 * GIB, 4), profile_of(*[100] * 100), presumed=DEEPSPEED)
    made = ask(known, train__batch_size=8, cluster__processes=2)
    least = min(made.tried, key=lambda one: one.token_s)
    assert (made.settings.engine, least.settings.engine) == ("ddp", "fsdp2")
    assert 1 + TIE < made.chosen.token_s / least.token_s < 1 + ENGINE_TIE


def test_on_a_cpu_nothing_waits_on_the_host_unless_asked(ask, facts_of, recipe_of):
    base = ask(facts_of(cpu(64 * GIB, 4)), cluster__processes=2).settings
    forms = open_forms(recipe_of({"cluster.processes": 2}), base, lambda name: True)
    assert {form.offload for form in forms} == {"none"}
    assert [form.engine for form in forms] == ["ddp", "fsdp2", "zero1", "zero2", "zero3"]


def test_a_pinned_plan_says_engine_and_offload(plan):
    made = plan("meta-llama/Llama-3.1-8B", "h100", 8, **SMALL_MICRO)
    assert pins(made.case.asked, made.settings)["cluster.engine"] == "zero2"
    made = plan("Qwen/Qwen3-1.7B", "4090", 8, cluster__engine="fsdp2", memory__budget="16GiB")
    wanted = pins(made.case.asked, made.settings)
    assert wanted.get("cluster.cpu_offload", "none") == made.settings.shard_offload


def test_what_is_sent_is_counted_by_hand(plan):
    """Two processes, 4 bytes a gradient: a sum brings each 2 * 1/2 of them, a gather 1/2 of the weights."""
    made = plan("Qwen/Qwen3-1.7B", "h100", 2, cluster__engine="ddp")
    shape, rates = made.case.facts.shape, made.case.facts.hardware.rates
    numbers, bus = shape.num_parameters, rates.host_bytes_per_s
    assert communication_time(made.settings, shape, rates).last == pytest.approx(4 * numbers / bus)
    first = made.settings.model_copy(update={"engine": "zero1"})
    sent = communication_time(first, shape, rates)
    assert (sent.last, sent.after, sent.forward) == (
        pytest.approx(2 * numbers / bus),
        pytest.approx(numbers / bus),
        0,
    )
    cut = communication_time(made.settings.model_copy(update={"engine": "fsdp2"}), shape, rates)
    starts = (shape.num_layers + 2) * 5e-5
    assert cut.forward == pytest.approx(numbers / bus + starts)
    # FSDP2 sums float32 gradients.
    assert cut.backward == pytest.approx((1 + 2) * numbers / bus + 2 * starts)


def test_shards_on_the_host_are_counted_there(plan):
    """Eight ranks with an eighth each of 2 + 4 + 4 + 8 bytes a weight: its gradient, copy and moments."""
    made = plan("Qwen/Qwen3-1.7B", "h100", 8, cluster__engine="fsdp2", cluster__cpu_offload="parameters")
    numbers = made.case.facts.shape.num_parameters
    assert 8 * waiting_bytes(made.settings, made.case.facts.shape) == pytest.approx(18 * numbers, rel=1e-6)
    facts = made.case.facts
    owners = host_bytes(made.settings, facts.shape, heaviest(made.settings, facts), 64, made.prediction)
    assert owners["shards"] == pytest.approx(18 * numbers, rel=1e-6)
    whole = price(made.settings.model_copy(update={"shard_offload": "none"}), facts)
    assert whole.need_bytes > made.chosen.need_bytes
    assert whole.step_s < made.chosen.step_s
