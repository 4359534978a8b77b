"""Whether the rewards of a recipe can be called, before anything is loaded; no torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from memtrain.errors import RecipeError
from memtrain.memory.plan.plan import PreparedData
from memtrain.recipes.reading.load import LoadedRecipe
from memtrain.recipes.sections.evaluation import Metrics
from memtrain.recipes.sections.rewards import Rewards
from memtrain.trainers.data.store.held_out_prompts import COLUMNS
from memtrain.trainers.data.store.token_store import TokenStore
from memtrain.trainers.online.rewards.declared import check_declared_environment, declared_functions
from memtrain.trainers.online.rewards.environment import PLACE
from memtrain.trainers.online.rewards.functions import ENVIRONMENT, check_columns
from memtrain.trainers.online.rewards.reading import prompt_of_row, reader_of


def check_rewards(loaded: LoadedRecipe, data: PreparedData | None = None) -> None:
    """Check that functions of rewards and metrics exist and take their arguments; with `data`, that its rows
    have them.

    Raises: RecipeError with every fault, each with its line.
    """
    rewards, metrics = loaded.recipe.rewards, loaded.recipe.eval.metrics
    try:
        if metrics is not None:
            check_columns(declared_functions(metrics), COLUMNS, metrics)
        if rewards is None:
            return
        found = declared_functions(rewards)
        store = TokenStore.open(data.train.folder) if data is not None else None
        columns = None if store is None else list(store.columns(0))
        if rewards.environment is not None:
            check_declared_environment(rewards.environment, columns)
        if store is not None:
            check_columns(found, _given(rewards, columns or ()))
            _check_models(rewards, store)
    except RecipeError as error:
        raise _at_their_lines(loaded, error) from None


def _at_their_lines(loaded: LoadedRecipe, error: RecipeError) -> RecipeError:
    """The error with the lines of the functions that it is about."""
    is_ours = (f"{Rewards.KEY}.functions", f"{Metrics.KEY}.functions")

    def place(where: str) -> str:
        if where == PLACE:
            return loaded.nearest(f"{PLACE}.path")
        return loaded.where(where) if where.startswith(is_ours) else where

    return RecipeError([replace(one, where=place(one.where)) for one in error.faults])


def check_first_row(loaded: LoadedRecipe, columns: Sequence[str]) -> None:
    """Check that the functions of rewards get what they need from the columns of the first row.

    Raises: RecipeError with every fault, each with its line.
    """
    rewards = loaded.recipe.rewards
    if rewards is None:
        return
    try:
        found = declared_functions(rewards)
        if rewards.environment is not None:
            check_declared_environment(rewards.environment)
    except RecipeError:  # Told already, by check_rewards.
        return
    try:
        if rewards.environment is not None:
            check_declared_environment(rewards.environment, columns)
        check_columns(found, _given(rewards, columns))
    except RecipeError as error:
        raise _at_their_lines(loaded, error) from None


def _given(rewards: Rewards, columns: Iterable[str]) -> list[str]:
    """Arguments of functions beside prompt and completion: the columns of a row, and an environment."""
    return [*columns, *([ENVIRONMENT] if rewards.environment is not None else [])]


def _check_models(rewards: Rewards, store: TokenStore) -> None:
    """Raise RecipeError where a reward model cannot read the prompts as it read the rows of its training."""
    asked = store.asked(0)
    for number, one in enumerate(rewards.functions):
        if one.model is not None and asked is not None:
            where = f"rewards.functions.{number}.model"
            reader_of(one.model).check(prompt_of_row(asked), one.label, where)
