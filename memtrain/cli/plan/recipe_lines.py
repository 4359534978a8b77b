"""Faults that name a key of the recipe, reported with the line that the key was written on."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from memtrain.errors import Fault, MemtrainError
from memtrain.recipes.reading.load import LoadedRecipe
from memtrain.recipes.recipe import Recipe

KEY = re.compile(r"[a-z_]+([.][a-z_]+|\[[0-9]+\])*")


@contextmanager
def at_their_lines(loaded: LoadedRecipe) -> Iterator[None]:
    """Inside, an error whose place is a key of the recipe gets the line of that key."""
    try:
        yield
    except MemtrainError as error:
        faults = tuple(replace(fault, where=place_of(fault, loaded)) for fault in error.faults)
        raise type(error)(faults) from error.__cause__


def place_of(fault: Fault, loaded: LoadedRecipe) -> str:
    """Place of a fault: `file:line:column` of its key where the key is written."""
    if not KEY.fullmatch(fault.where) or re.split(r"[.\[]", fault.where)[0] not in Recipe.model_fields:
        return fault.where
    found = loaded.nearest(fault.where)
    return fault.where if found == "default" else f"{found} ({fault.where})"
