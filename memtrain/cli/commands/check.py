"""`memtrain check`: is the recipe right, and what does it say."""

from __future__ import annotations

from typing import Annotated

import typer

from memtrain.cli.arguments import OverridesArgument, RecipeArgument
from memtrain.cli.output.terminal import print_table, say, whole


def check(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    every: Annotated[bool, typer.Option("--all", help="Show the keys left at their defaults too.")] = False,
) -> None:
    """Check a recipe: every fault at once, each with its line; else every key with where it was said."""
    from memtrain.cli.plan.check_rewards import check_rewards
    from memtrain.memory.planner.use_and_never import honoured
    from memtrain.memory.rules.ledger import SourcedRecipe
    from memtrain.recipes.reading.load import load_recipe
    from memtrain.recipes.reference.commented_yaml import settings

    loaded = load_recipe(recipe, overrides or ())
    honoured(SourcedRecipe(loaded.recipe, loaded.where))
    check_rewards(loaded)
    shown = [one for one in settings(loaded) if every or one[2] != "default"]
    rows = [(key, value, whole(where)) for key, value, where in shown]
    say(f"{whole(loaded.path)} is a valid {loaded.recipe.method} recipe.")
    say()
    print_table(("key", "value", "said at"), rows)
    if not every:
        say()
        say("Every other key has its default; --all shows them.")
