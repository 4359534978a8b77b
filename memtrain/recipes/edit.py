"""A recipe with one key changed."""

from __future__ import annotations

from memtrain.recipes.recipe import SECTIONS, Recipe
from memtrain.recipes.sections.base import Section
from memtrain.recipes.sections.generate import Generate

EMPTY: dict[str, type[Section]] = {"generate": Generate, **SECTIONS}
"""Sections that a recipe may leave out."""


def with_key(recipe: Recipe, key: str, value: object) -> Recipe:
    """The recipe with `section.name` set to a value; the given one is not changed."""
    section, _, name = key.partition(".")
    if not name:
        return recipe.model_copy(update={section: value})
    known = getattr(recipe, section) or EMPTY[section]()
    return recipe.model_copy(update={section: known.model_copy(update={name: value})})
