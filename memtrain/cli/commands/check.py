"""`memtrain check`: faults of a recipe, or its keys with their values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from memtrain.cli.arguments import OverridesArgument, RecipeArgument
from memtrain.cli.output.terminal import print_table, print_text, whole

if TYPE_CHECKING:
    pass

MOST_LETTERS = 60
"""Letters of a value in the table. Taste."""


def check(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    every: Annotated[bool, typer.Option("--all", help="Show the keys left at their defaults too.")] = False,
) -> None:
    """Check a recipe, its model and its data. All faults are shown at once, each with its line; without
    faults, every key with its place.

    Checked are keys, model and weight files, tokenizer, the first rows of each source, reward functions,
    trackers and packages. Nothing is downloaded or started.
    """
    from memtrain.cli.plan.check_run import check_rest, check_run
    from memtrain.errors import RecipeError
    from memtrain.recipes.reading.load import load_recipe
    from memtrain.recipes.reference.commented_yaml import settings

    try:
        loaded = load_recipe(recipe, overrides or ())
    except RecipeError as error:
        raise check_rest(recipe, overrides or (), error) from None
    found = check_run(loaded)
    shown = [one for one in settings(loaded) if every or one[2] != "default"]
    rows = [(key, _short(value), whole(where)) for key, value, where in shown]
    print_text(f"{whole(loaded.path)} is a valid {loaded.recipe.method} recipe.")
    print_text()
    print_table(("key", "value", "written at"), rows)
    print_text()
    print_table(("checked", "found"), [(one.item, one.found) for one in found])
    if not every:
        print_text()
        print_text("Every other key has its default; --all shows them.")


def _short(value: str) -> str:
    """A value as a cell: a long list or mapping ends in dots, and stands whole at its place in the file."""
    return value if len(value) <= MOST_LETTERS else f"{value[: MOST_LETTERS - 4]} ..."
