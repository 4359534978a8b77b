"""A file of TRL's to the text of a recipe, with notes and missing keys."""

from __future__ import annotations

from collections.abc import Mapping as ReadOnly
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from memtrain.errors import Fault, RecipeError
from memtrain.recipes.reading.load import load_text, read_mapping
from memtrain.recipes.reading.yaml_tree import plain
from memtrain.recipes.trl.translate import translate
from memtrain.recipes.trl.translation import Translation
from memtrain.recipes.trl.writing import inline, recipe_text


@dataclass(frozen=True, slots=True)
class Imported:
    """A recipe made of a TRL configuration."""

    text: str
    told: list[str]
    """Sentences, one for each key that is not carried over, and for each that means something else."""
    faults: list[Fault]
    """Faults that `memtrain check` would find; empty when the recipe is whole."""


def import_config(path: Path, method: str, processes: int | None) -> Imported:
    """The recipe of a TRL configuration. `processes`: devices of its run; else its own number, or 1.

    Raises: RecipeError when the file cannot be read.
    """
    config = cast(ReadOnly[str, Any], plain(read_mapping(path)))
    if "method" in config and "model" in config:
        raise RecipeError(
            f"{path} is a recipe of memtrain already", str(path), f"run `memtrain check {path}`"
        )
    said = config.get("num_processes")
    made = translate(config, method, processes or (said if isinstance(said, int) else 1))
    text = recipe_text(made, path.name)
    try:
        load_text(text, "recipe.yaml")
        faults: list[Fault] = []
    except RecipeError as error:
        faults = list(error.faults)
    return Imported(text, _told(made), faults)


def _told(made: Translation) -> list[str]:
    lines = [f"{one.key}: {inline(one.value)} is not carried over: {one.why}." for one in made.lost]
    return lines + [f"note: {note}." for note in made.notes]
