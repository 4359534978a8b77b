"""A TRL configuration -> the keys of a recipe that trains the same, and the keys without a counterpart."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Mapping
from typing import Any

from memtrain.errors import RecipeError
from memtrain.recipes.peers.table import Row, Same, table
from memtrain.recipes.reading.field_types import field_types, section_of
from memtrain.recipes.recipe import Recipe
from memtrain.recipes.trl import groups
from memtrain.recipes.trl.distillation import distillation
from memtrain.recipes.trl.translation import TRLS_DEFAULT, Translation

IMPORTED: tuple[str, ...] = ("sft", "dpo", "kto", "reward", "grpo", "rloo", "distill")
"""Methods whose configurations are read: all of TRL 1.16's command line, and its GKD."""

METHODS: tuple[str, ...] = (*IMPORTED, "ppo")
"""Methods of a translation: `ppo` is that of other tools."""

PAIRED: Mapping[str, str] = {"orpo": "dpo", "cpo": "dpo"}
"""Trainers of TRL that are losses of a method here."""


def translate(
    config: Mapping[str, Any],
    method: str,
    processes: int,
    assumed: Collection[str] = (),
    default_words: str = TRLS_DEFAULT,
) -> Translation:
    """The recipe of a TRL configuration, as dotted keys. `processes`: devices it was written for.

    `assumed`: keys of it that nobody wrote, defaults of another tool whose values stand with `default_words`.

    What TRL takes by default and memtrain does not (three epochs, a linear schedule, seed 42, ...) is written
    out, so that the recipe trains what the configuration did.

    Raises: RecipeError for a loss that has no counterpart.
    """
    trainer, method = method, PAIRED.get(method, method)
    made = Translation(
        config, method, processes, assumed=assumed, default_words=default_words, trainer=trainer
    )
    made.set("method", method)
    for read in groups.ALL:
        _together(read, made)
    for key, row in table("trl").rows.items():
        if key in made.used:
            continue
        if row.is_carried:
            _carry(made, key, row)
        elif row.lost and not row.group and key in config and not row.is_harmless(config[key]):
            made.lose(key, row.lost)
    known = table("trl").rows
    for key in config:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            asks = f"; did you mean {near[0]}?" if near else ""
            made.lose(key, f"not a known key of TRL {table('trl').version}{asks}")
    distillation(made)
    return made


def _together(read: Callable[[Translation], None], made: Translation) -> None:
    """Read keys that mean something together.

    Raises: RecipeError where a value is of another kind than TRL takes.
    """
    try:
        read(made)
    except (TypeError, ValueError, AttributeError, ArithmeticError, LookupError):
        rows = table("trl").rows
        given = [
            f"{key}: {str(value)[:80]}"
            for key, value in made.config.items()
            if key in rows and rows[key].group == read.__name__
        ]
        raise RecipeError(
            f"a value is of another kind than TRL takes: {', '.join(given)}",
            ", ".join(one.partition(":")[0] for one in given),
            "write it as TRL takes it",
        ) from None


def _carry(made: Translation, key: str, row: Row) -> None:
    """Carry a value over to its key; a value that belongs to another method is noted."""
    is_written = key in made.config
    value = made.config[key] if is_written else row.default_of(made.method)
    taken = row.taken(value)
    if taken is Same or (taken is None and (value is None or not is_written)):
        return
    target = row.to.format(method=made.method)
    section, _, name = target.partition(".")
    if section in METHODS and (section != made.method or name not in _knobs(section)):
        if is_written:
            made.lose(key, f"not used by {made.method}")
        return
    made.set(target, taken, of=[key])


def _knobs(method: str) -> set[str]:
    """Names of the keys of a method's own section."""
    section = section_of(field_types(Recipe)[method])
    return set() if section is None else set(section.model_fields)
