"""A TRL configuration -> the keys of a recipe that trains the same, and what could not be said."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from memtrain.recipes.fields import field_types, section_of
from memtrain.recipes.recipe import Recipe
from memtrain.recipes.trl.keys import KEYS
from memtrain.recipes.trl.rules import Gone, To

IMPORTED: tuple[str, ...] = ("sft", "dpo", "kto", "reward", "grpo", "rloo")
"""Methods whose configurations are read: those of TRL 1.16's command line."""

TRLS_DEFAULT = "TRL's default"
"""The comment beside a value that nobody wrote."""


@dataclass(frozen=True, slots=True)
class Lost:
    """A key of TRL that is not carried over."""

    key: str
    value: object
    why: str


@dataclass(slots=True)
class Translation:
    """What has been read so far: `said` by dotted key of the recipe, each with a comment (or "")."""

    config: Mapping[str, Any]
    method: str
    processes: int
    said: dict[str, tuple[object, str]] = field(default_factory=dict[str, tuple[object, str]])
    lost: list[Lost] = field(default_factory=list[Lost])
    notes: list[str] = field(default_factory=list[str])

    def get(self, key: str, default: Any) -> Any:
        """The value that TRL would take."""
        value = self.config.get(key)
        return default if value is None else value

    def say(self, key: str, value: object, *, of: Sequence[str] = (), comment: str = "") -> None:
        """Write a value; where none of the keys `of` is in the file, it is TRL's default."""
        if not comment and of and not any(one in self.config for one in of):
            comment = TRLS_DEFAULT
        self.said[key] = (value, comment)

    def lose(self, key: str, why: str) -> None:
        """Note that a key which is written has no counterpart."""
        self.lost.append(Lost(key, self.config.get(key), why))


def translate(config: Mapping[str, Any], method: str, processes: int) -> Translation:
    """The recipe of a TRL configuration, as dotted keys. `processes`: devices it was written for.

    What TRL takes by default and memtrain does not (three epochs, a linear schedule, seed 42, ...) is written
    out, so that the recipe trains what the configuration did.
    """
    from memtrain.recipes.trl import groups

    made = Translation(config, method, processes)
    made.say("method", method)
    for read in groups.ALL:
        read(made)
    for key, rule in KEYS.items():
        if isinstance(rule, To):
            _carry(made, key, rule)
        elif isinstance(rule, Gone) and key in config and not _among(config[key], rule.harmless):
            made.lose(key, rule.why)
    for key in config:
        if key not in KEYS:
            near = difflib.get_close_matches(key, KEYS, n=1)
            asks = f"; did you mean {near[0]}?" if near else ""
            made.lose(key, f"no key of TRL 1.16 that is known here{asks}")
    return made


def _carry(made: Translation, key: str, rule: To) -> None:
    """One value to one key, where it is another method's it is noted."""
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
    if section in IMPORTED and (section != made.method or name not in _knobs(section)):
        made.lose(key, f"{made.method} has no use for it")
        return
    if value is None and key != "max_grad_norm":
        return
    made.say(target, value, of=[key])


def _knobs(method: str) -> set[str]:
    """Names of the keys of a method's own section."""
    section = section_of(field_types(Recipe)[method])
    return set() if section is None else set(section.model_fields)


def _among(value: object, harmless: Sequence[object]) -> bool:
    return any(type(one) is type(value) and one == value for one in harmless)
