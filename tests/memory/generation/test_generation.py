"""Who writes the completions: what of a step is refused, and what the plan tells."""

from collections.abc import Callable
from typing import Any

import pytest

from memtrain.errors import RecipeError
from memtrain.memory.estimate.pricing import PlannerInputs
from memtrain.memory.generation.vllm import longest_prompt
from memtrain.memory.hardware.devices import Hardware
from memtrain.memory.planner.resolve import Resolved
from memtrain.recipes.sections.generate import Generate

Ask = Callable[..., Resolved]
GRPO: dict[str, Any] = {
    "method": "grpo",
    "rewards__functions": "exact_answer",
    "generate__backend": "vllm",
    "generate__max_tokens": 128,
    "train__batch_size": 64,
    "train__max_steps": 10,
}


@pytest.fixture
def on_h100(facts_of: Callable[..., PlannerInputs]) -> PlannerInputs:
    return facts_of(Hardware.named("h100"))


def decision(found: Resolved, setting: str) -> str:
    return next(f"{one.value}: {one.reason}" for one in found.decisions if one.setting == setting)


def test_a_step_that_is_no_whole_number_of_groups_is_refused(ask: Ask, on_h100: PlannerInputs):
    with pytest.raises(RecipeError, match="60 completions is not a whole number of groups of 8"):
        ask(on_h100, **(GRPO | {"generate__backend": "native", "train__batch_size": 60}))


def test_the_plan_tells_how_the_samplers_probabilities_are_corrected_for(ask: Ask, on_h100: PlannerInputs):
    found = ask(on_h100, **(GRPO | {"generate__vllm": {"python": "/envs/vllm/bin/python"}}))
    assert "another engine generates" in decision(found, "importance_correction")
    native = ask(on_h100, **(GRPO | {"generate__backend": "native"}))
    assert "the trained module generates the completions itself" in decision(native, "importance_correction")


def test_held_out_prompts_are_written_to_once_each(ask: Ask, on_h100: PlannerInputs):
    """Of 64 rows a group of 8 shares its prompt's keys; 64 held-out prompts have keys of their own, and the
    run counted them as generation: 43 % above the prediction."""
    words = GRPO | {"generate__backend": "native", "generate__rows": 64}
    plain, judged = (ask(on_h100, **words, **more) for more in ({}, {"data__eval": "held_out.jsonl"}))
    keys = [
        {
            owned.owner: owned.num_bytes
            for one in found.prediction.phases
            if one.phase == name
            for owned in one.owners
        }
        for found, name in ((plain, "generation"), (judged, "generation"), (judged, "evaluation"))
    ]
    assert keys[0] == keys[1]
    prompt = longest_prompt(on_h100, Generate(max_tokens=128))
    of_token = 2 * on_h100.shape.kv_width * on_h100.shape.num_layers * 2
    assert keys[2]["keys and values"] - keys[1]["keys and values"] == of_token * (64 - 8) * prompt
    owners = [
        owned.owner for one in plain.prediction.phases if one.phase == "evaluation" for owned in one.owners
    ]
    assert "keys and values" not in owners
