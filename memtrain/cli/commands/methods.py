"""`memtrain methods`: what a recipe may ask for."""

from __future__ import annotations

from memtrain.cli.printing import print_table
from memtrain.recipes.registry import METHODS


def methods() -> None:
    """List the methods that a recipe may ask for, as the verb or as `method:`."""
    print_table(("method", "what it does"), [(method.name, method.says) for method in METHODS.values()])
