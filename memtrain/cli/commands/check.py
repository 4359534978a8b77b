"""`memtrain check`: faults of a recipe, or its keys with their values."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from memtrain.cli.arguments import OverridesArgument, RecipeArgument
from memtrain.cli.output.terminal import print_table, print_text, whole

if TYPE_CHECKING:
    from memtrain.recipes.reading.load import LoadedRecipe

MOST_LETTERS = 60
"""Letters of a value in the table. Taste."""


def check(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    every: Annotated[bool, typer.Option("--all", help="Show the keys left at their defaults too.")] = False,
    rewrite: Annotated[
        bool,
        typer.Option(
            "--rewrite", help="Replace previous names of keys in the file by current ones; comments stay."
        ),
    ] = False,
) -> None:
    """Check a recipe, its model and its data. All faults are shown at once, each with its line; without
    faults, every key with its place.

    Checked are keys, model and weight files, tokenizer, the first rows of each source, reward functions,
    trackers and packages. Nothing is downloaded or started.
    """
    from memtrain.cli.output.previous_notes import read_recipe
    from memtrain.cli.plan.check_run import check_rest, check_run
    from memtrain.errors import RecipeError
    from memtrain.recipes.reference.commented_yaml import settings

    try:
        loaded = read_recipe(recipe, overrides or ())
    except RecipeError as error:
        raise check_rest(recipe, overrides or (), error) from None
    found = check_run(loaded)
    if rewrite:
        loaded = _rewritten(loaded, overrides or ())
    shown = [one for one in settings(loaded) if every or one[2] != "default"]
    rows = [(key, _short(value), whole(where)) for key, value, where in shown]
    print_text(f"{whole(loaded.path)} is a valid {loaded.recipe.method} recipe.")
    in_files = [one for one in loaded.renamed if one.place.line]
    if in_files:
        words = "1 previous name" if len(in_files) == 1 else f"{len(in_files)} previous names"
        print_text(
            f"{words} in it (see the notes): --rewrite writes the current ones, and keeps every comment."
        )
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


def _rewritten(loaded: LoadedRecipe, overrides: Sequence[str]) -> LoadedRecipe:
    """The recipe after today's names were written into its file and the files that it extends.

    Raises: RecipeError when a word cannot be replaced by itself, or a file cannot be written.
    """
    from memtrain.recipes.reading.load import load_recipe
    from memtrain.recipes.reading.rewrite import rewrite

    files = dict.fromkeys(one.place.source for one in loaded.renamed if one.place.line)
    if not files:
        print_text("It has no previous names; nothing was written.")
        return loaded
    for file in files:
        count = rewrite(Path(file), [one for one in loaded.renamed if one.place.source == file])
        print_text(f"{whole(file)}: {count} name{'' if count == 1 else 's'} rewritten.")
    return load_recipe(str(loaded.path), overrides)
