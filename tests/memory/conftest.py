"""Recipes, length profiles and facts made by hand: what the resolver is asked in tests."""

from collections.abc import Callable
from typing import Any

import pytest

from memtrain.memory.estimate.pricing import PlannerInputs
from memtrain.memory.hardware.devices import Hardware, cpu
from memtrain.memory.model_shape.shape import shape_of
from memtrain.memory.plan.length_profile import LengthProfile, LengthReport
from memtrain.memory.plan.units import GIB
from memtrain.memory.planner.resolve import Resolved, resolve
from memtrain.memory.rules.ledger import SourcedRecipe
from memtrain.recipes.recipe import Recipe

SMALL: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 32_000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "tie_word_embeddings": False,
}


def made_profile(*tokens: int) -> LengthProfile:
    """Sequences of so many tokens, half of them trained on."""
    report = LengthReport(
        num_rows=len(tokens),
        num_tokens=sum(tokens),
        num_loss_tokens=sum(tokens) // 2,
        rows_cut=0,
        rows_dropped=0,
        rows_split=0,
        pieces=len(tokens),
        tokens_cut=0,
        tokens_dropped=0,
        tokens_idle=0,
        loss_tokens_cut=0,
        loss_tokens_dropped=0,
        num_sequences=len(tokens),
        fill=1.0,
    )
    longest = tuple(sorted(tokens, reverse=True))
    return LengthProfile(report=report, total_tokens=sum(tokens), longest=longest, longest_piece=max(tokens))


def made_recipe(keys: dict[str, Any]) -> Recipe:
    """A recipe of dotted keys, with a model and data."""
    recipe: dict[str, Any] = {"method": "sft", "model": {"path": "m"}, "data": {"train": "d.jsonl"}}
    for key, value in keys.items():
        section, _, name = key.partition(".")
        if name:
            recipe.setdefault(section, {})[name] = value
        else:
            recipe[section] = value
    return Recipe.model_validate(recipe)


def made_facts(
    hardware: Hardware | None = None,
    lengths: LengthProfile | None = None,
    config: dict[str, Any] = SMALL,
    **more: Any,
) -> PlannerInputs:
    """Facts of a small model on a CPU, unless said otherwise."""
    return PlannerInputs(
        hardware=hardware or cpu(64 * GIB, 4),
        shape=shape_of(config),
        config=config,
        profile=lengths or made_profile(*[512] * 40, *[100] * 60),
        count_steps=lambda rows, tokens, epochs: int(epochs * 10),
        **{"method": "sft", **more},
    )


def made_ask(
    facts: PlannerInputs, act: Callable[[SourcedRecipe, PlannerInputs], Resolved] = resolve, **said: Any
) -> Resolved:
    """The plan for keys written as `section__name`; each is said at `r.yaml:section.name`."""
    keys = {key.replace("__", "."): value for key, value in said.items()}
    asked = SourcedRecipe(made_recipe(keys), lambda key: f"r.yaml:{key}" if key in keys else "default")
    return act(asked, facts)


@pytest.fixture(scope="session")
def profile_of() -> Callable[..., LengthProfile]:
    return made_profile


@pytest.fixture(scope="session")
def recipe_of() -> Callable[..., Recipe]:
    return made_recipe


@pytest.fixture(scope="session")
def facts_of() -> Callable[..., PlannerInputs]:
    return made_facts


@pytest.fixture(scope="session")
def ask() -> Callable[..., Resolved]:
    return made_ask
