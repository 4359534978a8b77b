"""Faults that name a key of the recipe, reported with the line that the key was written on.

Of a recipe without a file, made of the words of a command, a cure is given as such a word.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager

from memtrain.errors import Fault, MemtrainError
from memtrain.recipes.reading.load import LoadedRecipe
from memtrain.recipes.recipe import Recipe

LINE = re.compile(r"\b((?:data|length|model|train|optim|eval)(?:\.[a-z_]+)+): (\{[^{}]*\}|[\w./-]+)")
"""A key and its value, as a line of a recipe has them."""
KEY = re.compile(r"[a-z_]+([.][a-z_]+|\[[0-9]+\])*")


@contextmanager
def at_their_lines(loaded: LoadedRecipe) -> Iterator[None]:
    """Inside, an error whose place is a key of the recipe gets the line of that key."""
    try:
        yield
    except MemtrainError as error:
        faults = [Fault(one.what, place_of(one, loaded), cure_of(one, loaded)) for one in error.faults]
        raise type(error)(faults) from error.__cause__


def place_of(fault: Fault, loaded: LoadedRecipe) -> str:
    """Place of a fault: `file:line:column` of its key where the key is written."""
    if not KEY.fullmatch(fault.where) or re.split(r"[.\[]", fault.where)[0] not in Recipe.model_fields:
        return fault.where
    if not loaded.text and fault.where.startswith(("data.train", "model.path")):
        return "the command line"  # DATASET and --model, where nobody wrote a key.
    found = loaded.nearest(fault.where)
    return fault.where if found == "default" else f"{found} ({fault.where})"


def cure_of(fault: Fault, loaded: LoadedRecipe) -> str:
    """The cure; a line such as `data.columns: {prompt: a}` as a word where the recipe is made of words."""
    return fault.fix if loaded.text else LINE.sub(_word, fault.fix)


def _word(found: re.Match[str]) -> str:
    return shlex.quote(f"{found[1]}={found[2]}")
