"""Where nothing fits: the largest owners, and three ways out that the planner itself has planned."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from memtrain.errors import DoesNotFit
from memtrain.memory.estimate.pricing import PlannerInputs
from memtrain.memory.hardware.devices import Hardware, cpu
from memtrain.memory.model_shape.known_models import known_config
from memtrain.memory.plan.units import GIB, gib
from memtrain.memory.planner.resolve import Resolved

Ask = Callable[..., Resolved]


def facts(
    facts_of: Callable[..., PlannerInputs], profile_of: Callable[..., Any], model: str, card: str
) -> PlannerInputs:
    config = known_config(model)
    assert config is not None
    return facts_of(Hardware.named(card), profile_of(*[2048] * 64), dict(config))


def ways(ask: Ask, known: PlannerInputs, **said: Any) -> tuple[str, list[str]]:
    """(what does not fit, the ways out that are reported)."""
    with pytest.raises(DoesNotFit) as caught:
        ask(known, **said)
    fault = caught.value.faults[0]
    return fault.what, fault.fix.split("\n   or: ")


def test_seventy_billion_weights_in_full_on_one_card_have_three_ways_out(
    ask: Ask, facts_of: Any, profile_of: Any
):
    """131 GiB of weights, twice that of gradients, on 80 GiB: rounded weights, or 8 cards and their host."""
    what, reported = ways(ask, facts(facts_of, profile_of, "llama-3.3-70b", "h100"))
    assert "gradients 262.8 GiB, weights 131.4 GiB" in what
    assert len(reported) == 3
    assert "quantize: 4bit" in reported[0]
    assert reported[1].startswith("8 GPUs with cluster.engine: fsdp2 (peak ")
    assert all("(peak " in way for way in reported)


def test_the_peak_of_a_way_out_is_that_of_the_plan_one_gets(ask: Ask, facts_of: Any, profile_of: Any):
    """The recipe with the change, planned as a user would: it fits, with the peak that was reported."""
    known = facts(facts_of, profile_of, "llama-3.1-8b", "4090")
    _, reported = ways(ask, known)
    lora = ask(known, model__adapter={"kind": "lora"})
    assert reported[0] == f"model.adapter: {{kind: lora}} (peak {gib(lora.prediction.peak.num_bytes)})"
    card = ask(facts(facts_of, profile_of, "llama-3.1-8b", "h100"))
    assert f"H100 of 79.10 GiB (peak {gib(card.prediction.peak.num_bytes)})" in reported[2]


def test_a_budget_that_is_asked_for_stands_for_a_card_of_that_size(ask: Ask, facts_of: Any, profile_of: Any):
    """6 GiB of an H100: the next larger card is not one beyond 79 GiB."""
    known = facts(facts_of, profile_of, "llama-3.1-8b", "h100")
    _, reported = ways(
        ask, known, memory__budget="6GiB", model__adapter={"r": 8}, memory__weights_offload="off"
    )
    cards = [way for way in reported if way.startswith("a larger card, ")]
    assert cards
    assert all(float(way.split(" of ")[1].split(" GiB")[0]) < 40 for way in cards)


def test_where_the_host_is_what_is_short_the_first_way_out_is_one_that_spares_it(
    ask: Ask, facts_of: Any, profile_of: Any
):
    """8 billion float32 copies are 30 GiB: half of them have room in 128 GB, and the numbers are the same."""
    known = facts(facts_of, profile_of, "llama-3.1-8b", "4090")
    small = replace(known, hardware=replace(known.hardware, host_bytes=128 * 10**9))
    half = {"model__dtype": "bfloat16", "optim__master_weights": True}
    what, reported = ways(ask, small, **half)
    assert "smaller ones wait in host memory: the plan needs 12" in what
    split = ask(small, **half, optim__copies="split")
    assert reported[0] == f"optim.copies: split (peak {gib(split.prediction.peak.num_bytes)})"


def test_where_the_host_alone_is_short_ways_out_are_planned_for_that_host(
    ask: Ask, facts_of: Any, profile_of: Any
):
    """The device has room for two layers, and the host none for 8 billion states: what is offered has."""
    known = facts(facts_of, profile_of, "llama-3.1-8b", "4090")
    small = replace(known, hardware=replace(known.hardware, host_bytes=96 * 10**9))
    half = {"model__dtype": "bfloat16", "optim__master_weights": True, "memory__weights_offload": "on"}
    what, reported = ways(ask, small, **half)
    assert what.startswith("the plan needs 12")
    assert "of host memory, but only 89.41 GiB are there (" in what
    packed, auto = "model: {adapter: {kind: lora}, quantize: 4bit}", "memory.weights_offload: auto"
    presumed = replace(small, presumed=small.presumed | {"bitsandbytes"})
    asked = half | {"memory__weights_offload": "auto", "model__adapter": {}, "model__quantize": "4bit"}
    peak = ask(presumed, **asked).prediction.peak.num_bytes
    assert reported[0] == f"{packed} and {auto} (peak {gib(peak)})"
    cards = [way for way in reported if way.startswith("a larger card, ")]
    assert cards
    assert all(auto in way for way in cards)
    what, reported = ways(
        ask, replace(known, hardware=replace(known.hardware, host_bytes=124 * 10**9)), **half
    )
    assert reported[0].startswith("optim.copies: split (peak "), "the run as it was asked for, first"


def test_all_weights_of_8b_on_24_gib_have_a_way_out_that_people_take(
    ask: Ask, facts_of: Any, profile_of: Any
):
    """Each weight stepped in the backward pass, 8-bit states on the host: 15 GiB of weights and a row."""
    known = facts(facts_of, profile_of, "llama-3.1-8b", "4090")
    _, reported = ways(ask, known)
    way = "optim.max_grad_norm: null and optim.kind: paged_adamw_8bit and optim.master_weights: false"
    assert reported[-1].startswith(f"{way} and train.batch_size: 1")
    full = {"optim__max_grad_norm": None, "optim__kind": "paged_adamw_8bit"}
    made = ask(
        replace(known, presumed=frozenset({"bitsandbytes"})),
        **full,
        optim__master_weights=False,
        train__batch_size=1,
    )
    assert made.settings.in_backward
    assert made.settings.adapter is None
    assert reported[-1].endswith(f"(peak {gib(made.prediction.peak.num_bytes)})")


def test_ways_out_keep_to_what_must_not_be_used(ask: Ask, facts_of: Any, profile_of: Any):
    known = facts(facts_of, profile_of, "llama-3.1-8b", "4090")
    _, reported = ways(ask, known, memory__never=("lora", "adafactor"))
    assert reported
    assert not any("lora" in way or "adafactor" in way for way in reported)


def test_rows_too_long_for_any_card_are_shared_by_more(ask: Ask, facts_of: Any, profile_of: Any):
    config = known_config("llama-3.1-8b")
    known = facts_of(Hardware.named("h100"), profile_of(*[400_000] * 8), dict(config or {}))
    never = ("lora", "streamed_layers")
    _, reported = ways(ask, known, length__max_length=400_000, memory__never=never, train__batch_size=8)
    assert any("cluster.context_parallel: " in way for way in reported)


@pytest.mark.slow
def test_that_there_are_fewer_than_three_is_reported(ask: Ask, facts_of: Any, profile_of: Any):
    config = known_config("llama-3.3-70b")
    assert config is not None
    known = facts_of(Hardware.named("4090"), profile_of(*[2048] * 64), dict(config))
    _, reported = ways(ask, known, memory__budget="3GiB")
    assert len(reported) < 3
    assert "nothing else was found to fit: up to three changes of the recipe, up to 64 GPUs" in reported[-1]
    assert "\n" not in reported[-1], "A line end inside a way would be shown as an escape."


def test_what_no_change_makes_fit_says_how_far_changes_go(ask: Ask, facts_of: Any, profile_of: Any):
    config = known_config("llama-3.3-70b")
    known = facts_of(cpu(8 * GIB, 4), profile_of(*[2048] * 8), dict(config or {}))
    _, reported = ways(ask, known)
    assert reported[0].startswith("a larger device; the furthest that changes of the recipe go is ")


def test_more_cards_are_presumed_to_have_the_host_that_they_have_elsewhere(
    ask: Ask, facts_of: Any, profile_of: Any
):
    """8 were offered where `--solve num_gpus` and a plan for 4 said that 4 are enough: 94 GiB of host stood
    beside them, not 168."""
    known = facts(facts_of, profile_of, "llama-3.1-8b", "4090")
    _, reported = ways(ask, known, model__dtype="bfloat16", optim__master_weights=True)
    (cards,) = [way for way in reported if " GPUs with " in way]
    number = int(cards.split(" ")[0])
    config = known_config("llama-3.1-8b")
    assert config is not None
    several = facts_of(Hardware.named("4090", number), profile_of(*[2048] * 64), dict(config))
    asked = {"model__dtype": "bfloat16", "optim__master_weights": True, "cluster__engine": "fsdp2"}
    found = ask(several, **asked, cluster__processes=number)
    assert cards == f"{number} GPUs with cluster.engine: fsdp2 (peak {gib(found.prediction.peak.num_bytes)})"
    assert number == 4


def test_vllm_is_told_and_generation_without_it_is_a_way_out(ask: Ask, facts_of: Any, profile_of: Any):
    """4B on 9.64 GiB, of which vLLM asleep holds 1.20: "no plan fits 8.44 GiB", and other cards alone."""
    known = facts(facts_of, profile_of, "qwen3-4b", "3080")
    known = replace(known, presumed=known.presumed | {"vllm"})
    run = {"method": "grpo", "rewards__functions": "exact_answer", "generate__max_tokens": 128}
    run |= {"model__adapter": {"r": 8}, "train__batch_size": 8, "train__max_steps": 10}
    vllm = {"generate__backend": "vllm", "generate__vllm": {"python": "python"}}
    what, reported = ways(ask, known, **run, **vllm)
    assert what.startswith(
        "no plan fits 9.64 GiB of 3080, 1.20 GiB of which vLLM holds while weights are trained: "
    )
    assert reported[0].startswith("generate.backend: native and generate.vllm: null (peak ")
