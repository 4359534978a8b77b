"""Rules for one key of a TRL configuration: another key, nothing to say, or no counterpart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

Method = str


@dataclass(frozen=True, slots=True)
class RecipeKey:
    """The value goes to a key of the recipe; `{method}` in it stands for the method's own section.

    `default`: what TRL takes where nothing is written, where that is not memtrain's own default; a mapping
    gives it by method, `*` for the others. `values`: other words for its values; a value that maps to None is
    left out, because it is what memtrain does by default.
    """

    key: str
    default: object = None
    values: Mapping[object, object] = field(default_factory=dict[object, object])

    def default_of(self, method: Method) -> object:
        """TRL's default for a method, where it has to be written."""
        default = self.default
        if not isinstance(default, Mapping):
            return default
        by_method = cast(Mapping[str, object], default)
        return by_method.get(method, by_method.get("*"))


@dataclass(frozen=True, slots=True)
class Automatic:
    """Nothing to say: memtrain does it without being asked, or decides it in the plan."""

    why: str


@dataclass(frozen=True, slots=True)
class Unmapped:
    """No counterpart: the reason, and the way out. Not listed where the value is one of `harmless`."""

    why: str
    harmless: tuple[object, ...] = (None, False)


@dataclass(frozen=True, slots=True)
class ReadTogether:
    """Read together with other keys, by a function of `translate.py`."""


Rule = RecipeKey | Automatic | Unmapped | ReadTogether
