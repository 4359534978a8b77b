"""The state of a translation from TRL: keys read so far."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from memtrain.recipes.peers.table import table

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
    """Result of the translation so far: values by dotted key of the recipe, each with a comment (or "")."""

    config: Mapping[str, Any]
    method: str
    processes: int
    recipe_keys: dict[str, tuple[object, str]] = field(default_factory=dict[str, tuple[object, str]])
    lost: list[Lost] = field(default_factory=list[Lost])
    notes: list[str] = field(default_factory=list[str])
    assumed: Collection[str] = ()
    """Keys of `config` that nobody wrote: defaults of another tool."""
    default_words: str = TRLS_DEFAULT
    """The comment beside a value that nobody wrote."""
    trainer: str = ""
    """The trainer, where it is a loss of the method here: `orpo`, `cpo`."""
    used: set[str] = field(default_factory=set[str])
    """Keys that were written elsewhere than their rows say."""

    def get(self, key: str, default: Any = None) -> Any:
        """The value that TRL would take: what is written, `default`, or the default of the table."""
        value = self.config.get(key)
        if value is None:
            value = default
        return table("trl").default(key, self.method) if value is None else value

    def set(self, key: str, value: object, *, of: Sequence[str] = (), comment: str = "") -> None:
        """Write a value; where none of the keys `of` is in the file, it is TRL's default."""
        written = [one for one in of if one in self.config and one not in self.assumed]
        if not comment and of and not written:
            comment = self.default_words
        self.recipe_keys[key] = (value, comment)

    def lose(self, key: str, why: str) -> None:
        """Note that a key which is written has no counterpart."""
        self.lost.append(Lost(key, self.config.get(key), why))
