"""Weights on the host are planned where nothing faster fits, and refused with the reason and the cure."""

from typing import Any

import pytest

from memtrain.errors import DoesNotFit, RecipeError
from memtrain.memory.hardware.devices import Hardware
from memtrain.memory.model_shape.known_models import known_config
from memtrain.memory.plan.units import gib

HALF: dict[str, Any] = {"model__dtype": "bfloat16", "train__batch_size": 4}
ON: dict[str, Any] = HALF | {"memory__weights_offload": "on"}


@pytest.fixture
def facts(facts_of, profile_of):
    return facts_of(Hardware.named("h100"), profile_of(*[512] * 64))


def test_a_recipe_that_says_so_gets_it_with_checkpointing(ask, facts):
    settings = ask(facts, **ON).settings
    assert settings.weights_offload
    assert settings.checkpoint_every == 1 or settings.slice_tokens


def test_an_adapter_goes_along_where_the_recipe_says_so(ask, facts):
    stays = ask(facts, **ON, model__adapter={"r": 8}).settings
    goes = ask(facts, **HALF, memory__weights_offload="all", model__adapter={"r": 8}).settings
    assert (stays.weights_offload, stays.adapters_offload) == (True, False)
    assert (goes.weights_offload, goes.adapters_offload) == (True, True)


def test_a_small_adapter_goes_along_only_where_nothing_else_fits(ask, facts_of, profile_of):
    """8B in 4 bits on 4 GiB: an adapter on the device needs 4.2; a recipe that says `on` gets the way out."""
    config = known_config("llama-3.1-8b")
    assert config is not None
    profile, has = profile_of(*[2048] * 64), frozenset({"bitsandbytes"})
    facts = facts_of(Hardware.named("h100"), profile, dict(config), presumed=has)
    quantized = HALF | {"model__adapter": {"r": 16}, "model__quantize": "4bit", "save__async_save": False}
    roomy = ask(facts, **quantized, memory__budget="5GiB").settings
    assert (roomy.weights_offload, roomy.adapters_offload) == (True, False)
    tight = ask(facts, **quantized, memory__budget="4GiB")
    assert (tight.settings.weights_offload, tight.settings.adapters_offload) == (True, True)
    with pytest.raises(DoesNotFit) as caught:
        ask(facts, **quantized, memory__budget="4GiB", memory__weights_offload="on")
    peak = gib(tight.prediction.peak.num_bytes)
    assert f"memory.weights_offload: all (peak {peak})" in caught.value.faults[0].fix


def test_it_is_found_where_nothing_else_fits_and_not_before(ask, facts):
    assert not ask(facts, **HALF).settings.weights_offload
    tight = ask(facts, **HALF, memory__budget="2GiB").settings
    assert tight.weights_offload
    with pytest.raises(DoesNotFit):
        ask(facts, **HALF, memory__budget="2GiB", memory__never="weights_offload")


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({"cluster__processes": 2}, "only the frozen weights under an adapter can wait on the host"),
        (
            {"cluster__processes": 2, "model__adapter": {"r": 8}, "memory__weights_offload": "all"},
            "only the frozen weights under an adapter can wait on the host",
        ),
        (
            {"cluster__processes": 2, "cluster__engine": "fsdp2", "model__adapter": {"r": 8}},
            "only the frozen weights under an adapter can wait on the host",
        ),
        ({"optim__kind": "muon"}, "has no kernels for it"),
        (
            {
                "method": "grpo",
                "generate__num_generations": 2,
                "rewards__functions": ("builtin:length",),
                "generate__backend": "vllm",
            },
            "weights are sent to vLLM from the device",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_its_reason(ask, facts_of, profile_of, said, reason):
    facts = facts_of(Hardware.named("h100", 2), profile_of(*[512] * 64))
    with pytest.raises(RecipeError, match=reason):
        ask(facts, **(ON | said))


@pytest.mark.parametrize("method", ["sft", "grpo"])
def test_completions_are_written_with_weights_on_the_host(ask, facts, method):
    """A pass over the layers for each token, which the plan says; nothing is captured."""
    grpo = {
        "method": "grpo",
        "generate__num_generations": 2,
        "generate__max_tokens": 64,
        "rewards__functions": ("builtin:length",),
    }
    said = grpo if method == "grpo" else {"eval__samples": {"prompts": ["Once"], "max_tokens": 8}}
    plan = ask(facts, **(ON | said))
    assert plan.settings.weights_offload
    assert not plan.settings.cuda_graphs
    rows = next(one for one in plan.decisions if one.setting in ("rollout_rows", "sample_rows"))
    assert rows.reason.endswith("of weights from the host for each token")


def test_frozen_weights_go_to_the_host_of_each_process(ask, facts_of, profile_of):
    """Under an adapter, and the engine is DDP where it is left open."""
    facts = facts_of(Hardware.named("h100", 2), profile_of(*[512] * 64))
    settings = ask(facts, **ON, model__adapter={"r": 8}, cluster__processes=2).settings
    assert (settings.engine, settings.weights_offload) == ("ddp", True)


def test_a_host_that_is_too_small_is_reported_with_the_number(ask, facts_of, profile_of):
    from dataclasses import replace

    small = replace(Hardware.named("h100"), host_bytes=4 * 2**30)
    facts = facts_of(small, profile_of(*[512] * 64))
    with pytest.raises(DoesNotFit, match=r"of host memory, but only 4.00 GiB"):
        ask(facts, **ON)


@pytest.mark.parametrize(
    ("said", "is_last"),
    [
        ({"model__adapter": {"r": 8}}, True),
        ({}, False),
        ({"model__adapter": {"r": 8}, "memory__weights_offload": "off"}, False),
        ({"model__adapter": {"r": 8}, "memory__never": ("weights_offload",)}, False),
    ],
    ids=["adapter", "all weights", "off", "never"],
)
def test_frozen_weights_may_go_there_when_memory_runs_out(ask, facts, said: dict[str, Any], is_last: bool):
    """On one GPU under an adapter, where the recipe does not rule it out."""
    assert ("weights" in ask(facts, **HALF, **said).settings.recovery) == is_last
