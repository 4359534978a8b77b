"""Held-out rows that are longer than those of training: what their length rules out is found before a run."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from memtrain.errors import RecipeError
from memtrain.memory.estimate.pricing import PlannerInputs
from memtrain.memory.generation.generation import longest_held_out_prompt, num_held_out
from memtrain.memory.generation.vllm import longest_prompt, longest_read
from memtrain.memory.model_shape.shape import ModelShape
from memtrain.memory.plan.length_profile import LengthProfile
from memtrain.memory.planner.resolve import Resolved
from memtrain.recipes.recipe import Recipe
from memtrain.recipes.sections.generate import Generate

Profile = Callable[..., LengthProfile]


def test_held_out_rows_past_the_models_positions_are_refused(
    ask: Callable[..., Resolved],
    facts_of: Callable[..., PlannerInputs],
    profile_of: Profile,
    monkeypatch: pytest.MonkeyPatch,
):
    """Training rows of 512 tokens fit a table of 1,024 positions; a held-out row of 1,500 does not."""
    monkeypatch.setattr(ModelShape, "num_positions", 1024)
    facts = facts_of()
    asked = {"train__batch_size": 4, "train__max_steps": 2}
    assert ask(facts, **asked).settings.batch_size == 4
    with pytest.raises(RecipeError, match="the longest row has 1,500 tokens, .* 1,024 positions"):
        ask(replace(facts, held_out=(profile_of(1500, 20), None)), **asked)


def test_held_out_prompts_have_their_own_number_and_length(
    facts_of: Callable[..., PlannerInputs], profile_of: Profile, recipe_of: Callable[[dict[str, Any]], Recipe]
):
    """Completions of two for each of three prompts, of at most 1,500 tokens with 500 of a completion."""
    generate = Generate(num_generations=2, max_tokens=500)
    recipe = recipe_of(
        {
            "method": "grpo",
            "rewards.functions": ["exact_answer"],
            "generate.num_generations": 2,
            "generate.max_tokens": 500,
            "data.eval": "held_out.jsonl",
        }
    )
    unread = facts_of()
    assert longest_held_out_prompt(unread, generate) == longest_prompt(unread, generate) == 12
    read = replace(unread, held_out=(profile_of(1500, 1500, 900, 900, 700, 700), None))
    assert num_held_out(recipe, read) == 3
    assert (longest_prompt(read, generate), longest_held_out_prompt(read, generate)) == (12, 1000)
    assert longest_read(read, generate) == 1000
