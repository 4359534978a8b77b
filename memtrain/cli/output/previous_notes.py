"""A recipe for a command of the command line: read, and its previous names reported on stderr."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from memtrain.recipes.reading.load import LoadedRecipe, load_recipe
from memtrain.recipes.reading.yaml_tree import Renaming


def read_recipe(recipe: str, overrides: Sequence[str] = (), *, method: str | None = None) -> LoadedRecipe:
    """The recipe, as `load_recipe` has it; a line on stderr for every previous name in it.

    Raises: RecipeError with every fault that was found.
    """
    loaded = load_recipe(recipe, overrides, method=method)
    print_renamed(loaded)
    return loaded


def print_renamed(loaded: LoadedRecipe, known: Sequence[Renaming] = ()) -> None:
    """Print a note for every previous name that a recipe was read with, but for those `known` already."""
    for one in loaded.renamed:
        if one not in known:
            print(f"note: {one}", file=sys.stderr)
