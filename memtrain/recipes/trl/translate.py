"""A TRL configuration -> the keys of a recipe that trains the same, and the keys without a counterpart."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from memtrain.recipes.reading.field_types import field_types, section_of
from memtrain.recipes.recipe import Recipe
from memtrain.recipes.trl import groups
from memtrain.recipes.trl.distillation import distillation
from memtrain.recipes.trl.keys import KEYS
from memtrain.recipes.trl.rules import RecipeKey, Unmapped
from memtrain.recipes.trl.translation import TRLS_DEFAULT, Translation

IMPORTED: tuple[str, ...] = ("sft", "dpo", "kto", "reward", "grpo", "rloo", "distill")
"""Methods whose configurations are read: all of TRL 1.16's command line, and its GKD."""

METHODS: tuple[str, ...] = (*IMPORTED, "ppo")
"""Methods of a translation: `ppo` is that of other tools."""


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
    """
    made = Translation(config, method, processes, assumed=assumed, default_words=default_words)
    made.set("method", method)
    for read in groups.ALL:
        read(made)
    for key, rule in KEYS.items():
        if isinstance(rule, RecipeKey):
            _carry(made, key, rule)
        elif isinstance(rule, Unmapped) and key in config and not _among(config[key], rule.harmless):
            made.lose(key, rule.why)
    for key in config:
        if key not in KEYS:
            near = difflib.get_close_matches(key, KEYS, n=1)
            asks = f"; did you mean {near[0]}?" if near else ""
            made.lose(key, f"not a known key of TRL 1.16{asks}")
    distillation(made)
    return made


def _carry(made: Translation, key: str, rule: RecipeKey) -> None:
    """Carry a value over to its key; a value that belongs to another method is noted."""
    written = key in made.config
    value = made.config[key] if written else rule.default_of(made.method)
    if not written and value is None:
        return
    for old, new in rule.values.items():
        if isinstance(old, bool) is isinstance(value, bool) and old == value:
            value = new
            break
    else:
        if value is None:
            return
    target = rule.key.format(method=made.method)
    section, _, name = target.partition(".")
    if section in METHODS and (section != made.method or name not in _knobs(section)):
        made.lose(key, f"not used by {made.method}")
        return
    if value is None and key != "max_grad_norm":
        return
    made.set(target, value, of=[key])


def _knobs(method: str) -> set[str]:
    """Names of the keys of a method's own section."""
    section = section_of(field_types(Recipe)[method])
    return set() if section is None else set(section.model_fields)


def _among(value: object, harmless: Sequence[object]) -> bool:
    return any(type(one) is type(value) and one == value for one in harmless)
