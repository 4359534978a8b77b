"""Sums in one order: what is refused on a GPU, and nothing where nobody asks."""

from dataclasses import replace
from typing import Any

import pytest

from memtrain.errors import RecipeError
from memtrain.memory.hardware.devices import Hardware, cpu


@pytest.mark.parametrize("hardware", [cpu(2**36, 4), Hardware.named("h100")], ids=["cpu", "gpu"])
def test_sums_have_one_order_where_the_recipe_asks(
    hardware: Hardware, ask: Any, facts_of: Any, profile_of: Any
):
    facts = facts_of(hardware, profile_of(100, 200))
    plain, asked = ask(facts), ask(facts, train__deterministic=True)
    assert asked.settings == plain.settings.model_copy(update={"deterministic": True})
    assert [one.setting for one in asked.decisions if one not in plain.decisions] == ["deterministic"]


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"method": "grpo", "rewards": {"functions": "length"}}, "completions of grpo are drawn by sums"),
        ({"eval__samples": {"prompts": ["a"]}}, "answers of eval.samples and eval.metrics are drawn by sums"),
    ],
)
def test_completions_are_refused_on_a_gpu_alone(
    said: dict[str, Any], words: str, ask: Any, facts_of: Any, profile_of: Any
):
    method = said.get("method", "sft")
    facts = facts_of(Hardware.named("h100"), profile_of(100, 200), method=method)
    with pytest.raises(RecipeError) as caught:
        ask(facts, train__deterministic=True, **said)
    assert any(words in fault.what and "cluster.device: cpu" in fault.fix for fault in caught.value.faults)


def test_layers_with_a_state_are_refused_on_a_gpu(ask: Any, facts_of: Any, profile_of: Any):
    """Kernels of mamba_ssm and causal_conv1d add their gradients up as threads end."""
    facts = facts_of(Hardware.named("h100"), profile_of(100, 200))
    facts = replace(facts, config=facts.config | {"model_type": "mamba", "layer_types": ["mamba"] * 2})
    with pytest.raises(RecipeError, match="layers add up gradients in no fixed order"):
        ask(facts, train__deterministic=True)
