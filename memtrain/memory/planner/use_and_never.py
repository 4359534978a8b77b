"""`memory.use` and `memory.never`: a recipe with the keys of these strategies set."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations

from pydantic import ValidationError

from memtrain.errors import Fault, RecipeError
from memtrain.memory.rules.ledger import SourcedRecipe
from memtrain.memory.strategies.base import Strategy
from memtrain.memory.strategies.registry import STRATEGIES, is_searched
from memtrain.recipes.edit import with_key
from memtrain.recipes.recipe import Recipe

ONE_OF: Mapping[str, str] = {
    "checkpointing": "either every layer is checkpointed, or every n-th",
    "offloading": "either the inputs of checkpointed layers are offloaded to CPU, or all activations that "
    "the layers keep",
    "loss": "a run uses one loss kernel",
    "optimizer": "a run uses one optimizer",
    "reference": "the reference's log-probs are either computed before training or in every step",
}
"""Axes of which a run has one strategy, and why."""


def with_use_and_never(asked: SourcedRecipe) -> SourcedRecipe:
    """The same wish with the keys that its strategies stand for; strategies the search decides stay names.

    Raises: RecipeError when a strategy is both used and never used, the recipe's own keys say otherwise, or
    the keys that strategies stand for do not go together.
    """
    memory = asked.recipe.memory
    faults = [
        Fault(
            f"{name} is in memory.use and in memory.never",
            asked.where("memory.never"),
            "remove it from one of them",
        )
        for name in memory.use
        if name in memory.never
    ]
    faults += [
        Fault(
            f"{first} cannot be combined with {second}: {ONE_OF[STRATEGIES[first].axis]}",
            asked.where("memory.use"),
            "remove one of them",
        )
        for first, second in combinations(memory.use, 2)
        if STRATEGIES[first].axis == STRATEGIES[second].axis and STRATEGIES[first].axis in ONE_OF
    ]
    if faults:
        raise RecipeError(faults)
    faults += [fault for name in memory.use if (fault := _contradicted(asked, STRATEGIES[name], "use"))]
    faults += [fault for name in memory.never if (fault := _contradicted(asked, STRATEGIES[name], "never"))]
    if faults:
        raise RecipeError(faults)
    recipe, places = asked.recipe, dict[str, str]()
    for word, names in (("use", memory.use), ("never", memory.never)):
        for name in names:
            strategy = STRATEGIES[name]
            if is_searched(strategy):
                continue
            keys = _keys(strategy, recipe, word)
            places |= dict.fromkeys(keys, asked.where(f"memory.{word}"))
            for key, value in keys.items():
                recipe = with_key(recipe, key, value)
    if recipe is not asked.recipe:
        _check(recipe, asked)
    return SourcedRecipe(recipe, lambda key: places.get(key) or asked.where(key))


def _check(recipe: Recipe, asked: SourcedRecipe) -> None:
    """Raise RecipeError where the keys that strategies stand for do not go together, or with the method."""
    named = "memory.use" if asked.recipe.memory.use else "memory.never"
    try:
        Recipe.model_validate(recipe.model_dump())
    except ValidationError as error:
        messages = [str(fault["msg"]).removeprefix("Value error, ") for fault in error.errors()]
        what = "memory.use and memory.never do not give a valid recipe together"
        fix = "choose other strategies there"
        raise RecipeError([Fault(f"{what}: {one}", asked.where(named), fix) for one in messages]) from None


def _keys(strategy: Strategy, recipe: Recipe, word: str) -> Mapping[str, object]:
    """Keys that a word stands for; nothing where the recipe's own keys say so already."""
    own = strategy.wish(recipe)
    if own == ("on" if word == "use" else "off"):
        return {}
    return (strategy.use_keys if word == "use" else strategy.never_keys)(recipe)


def _contradicted(asked: SourcedRecipe, strategy: Strategy, word: str) -> Fault | None:
    """The fault of a key that was written against `memory.use` or `memory.never`."""
    own = strategy.wish(asked.recipe)
    if own != ("off" if word == "use" else "on"):
        return None
    for key in strategy.use_keys(asked.recipe):
        if asked.is_set(key):
            return Fault(
                f"memory.{word} names {strategy.name}, and {key} contradicts it ({asked.where(key)})",
                asked.where(f"memory.{word}"),
                f"remove {key}, or {strategy.name} from memory.{word}",
            )
    return None
