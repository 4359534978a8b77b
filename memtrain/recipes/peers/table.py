"""The table of another trainer: a row for each of its keys, read from `keys/NAME.toml`.

```toml
[tool]         # name (as --tool takes it), title, version, source of the rows, and what of the tool is read
[sentences]    # of several rows: upload = "nothing is uploaded", then lost = "$upload"

["Model"]      # a heading of the tool's page, with its rows; a key with * stands for all that it matches
base_model = {to = "model.path"}
seq_len = {trl = "max_length", default = 512}
optim = {to = "optim.kind", values = {adamw_torch = "adamw"}, with = "optimizer"}
gc = {to = "memory.activation_checkpointing", values = {true = "on"}, same = [false]}
fp8 = {lost = "FP8 training", harmless = [false]}
tf32 = {done = "TensorFloat-32 keeps torch's setting"}

[assumed]      # what the tool takes and has no key for, by TRL's names
```

A row says one of:
- `to`: the value is that of this key of the recipe; `{method}` in it stands for the method's own section;
- `trl`: the value is that of TRL's key of this name, whose own row then applies;
- `done`: nothing has to be said, because memtrain does it by itself, or decides it in the plan;
- `lost`: there is no counterpart: the reason, and the way out. It is told where the key is written, but not
  for a value among `harmless` (`[false]`, where nothing else is said).

and beside it:
- `with`: it is read together with other keys, by the function of this name in the tool's module, which writes
  the value; then `to` and `trl` only say where it goes, and may be left out;
- `values`: other words for its values, `false`, `null` and `4` as they are written in YAML; the word `null`
  writes nothing at all there. `same`: values that memtrain takes by itself, which are left out;
- `default`: what the tool takes where nothing is written, of the version in `[tool]`; by method it is a
  table: `{sft = 2e-5, "*" = 1e-6}`, where `*` stands for the others. It is written into a recipe where
  memtrain takes something else;
- `words`: what is said where somebody writes the key into a recipe, if `to`, `done` or `lost` do not say it;
- `saves`: changes of the key that save memory (`Saving`), for `memtrain rescue`.

A text in place of a row is its `words`, of a key that no configuration is read by.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any, cast

NAMES = ("trl", "axolotl", "llamafactory", "unsloth", "verl", "others")
"""The tables; `others` has words of trainers that are not read, and everyday ones."""

_NONE: Mapping[str, Any] = MappingProxyType({})
_MEANINGS = ("to", "trl", "done", "lost")


@dataclass(frozen=True, slots=True)
class Saving:
    """A change of a key that saves memory. Changes of the same kind exclude each other."""

    change: str
    """The kind: `checkpointing`, `rows`, `optimizer`, ..."""
    value: tuple[object, ...] = ()
    """The values to set, each a change of its own, the mildest first."""
    below: tuple[float, ...] = ()
    """The same, only where it is less than what is there."""
    divide: tuple[int, ...] = ()
    """What is there divided by each of these; 0: one."""
    unset: object = None
    """What the tool takes where the key is not written."""
    times: str = ""
    """A key that is multiplied by what another was divided by."""
    least: int = 1
    """The least number that is proposed."""
    holds: tuple[str, ...] = ()
    """Keys (512 where nothing is written) whose sum has to stay under the number."""
    also: Mapping[str, object] = field(default_factory=lambda: _NONE)
    """Other keys that are set with it."""
    where: Mapping[str, tuple[object, ...]] = field(default_factory=lambda: _NONE)
    """Other keys that must have one of these values; `unset` and `set` are values too."""
    methods: tuple[str, ...] = ()
    """The methods that it is for; none: all."""
    devices: int = 1
    """The least number of devices that it is for."""
    learns: str = ""
    """The difference in learning; empty: the same numbers up to rounding."""


@dataclass(frozen=True, slots=True)
class Row:
    """A key of another trainer; the fields are said at the head of this file."""

    key: str
    heading: str
    to: str = ""
    trl: str = ""
    done: str = ""
    lost: str = ""
    group: str = ""
    """`with` of the file."""
    words: str = ""
    values: Mapping[str, object] = field(default_factory=lambda: _NONE)
    same: tuple[object, ...] = ()
    harmless: tuple[object, ...] = (False,)
    default: object = None
    saves: tuple[Saving, ...] = ()

    @property
    def is_carried(self) -> bool:
        """Whether the value goes where `to` or `trl` says, as it is."""
        return bool(self.to or self.trl) and not self.group

    def default_of(self, method: str) -> Any:
        """The tool's default for a method."""
        if not isinstance(self.default, Mapping):
            return self.default
        by_method = cast(Mapping[str, object], self.default)  # pyright: ignore[reportUnknownMemberType]
        return by_method.get(method, by_method.get("*"))

    def taken(self, value: object) -> object:
        """Our word for a value; `Same` where memtrain takes it by itself."""
        word = yaml_word(value)
        if word in map(yaml_word, self.same):
            return Same
        if word not in self.values:
            return value
        return None if self.values[word] == "null" else self.values[word]

    def is_harmless(self, value: object) -> bool:
        """Whether nothing is lost with this value."""
        return value in (None, "") or yaml_word(value) in map(yaml_word, self.harmless)


class Same:
    """The value of a key that memtrain takes by itself."""


@dataclass(frozen=True, slots=True)
class Table:
    """The keys of a trainer."""

    name: str
    title: str
    version: str
    source: str
    reads: str
    """What of it is read; empty where no configuration is."""
    rows: Mapping[str, Row]
    assumed: Mapping[str, object] = field(default_factory=lambda: _NONE)
    """What the tool takes and has no key for, by TRL's names."""
    values: Mapping[str, Mapping[str, str]] = field(default_factory=lambda: _NONE)
    """Other words for values of keys of the recipe."""

    def __contains__(self, key: str) -> bool:
        return self.row(key) is not None

    def row(self, key: str) -> Row | None:
        """The row of a key; None for an unknown key."""
        found = self.rows.get(key)
        if found is None:
            pattern = next((one for one in self.rows if "*" in one and fnmatchcase(key, one)), None)
            found = None if pattern is None else self.rows[pattern]
        return found

    def default(self, key: str, method: str) -> Any:
        """The tool's default of a key for a method."""
        return self.rows[key].default_of(method)

    def defaults(self, method: str) -> dict[str, object]:
        """The tool's defaults by TRL's keys, for a method."""
        held = ((row.trl, row.default_of(method)) for row in self.rows.values() if row.trl)
        return {key: value for key, value in held if value is not None} | dict(self.assumed)

    def sections(self) -> Iterator[tuple[str, list[Row]]]:
        """(heading, its rows)."""
        found: dict[str, list[Row]] = {}
        for row in self.rows.values():
            found.setdefault(row.heading, []).append(row)
        yield from found.items()


def yaml_word(value: object) -> str:
    """A value as it is written in YAML: `true`, `null`, `4`, `text`."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, int | float) else str(value)


@cache
def table(name: str) -> Table:
    """The table of a trainer.

    Raises: ValueError for a row that says nothing, too much, or something unknown.
    """
    read: dict[str, Any] = tomllib.loads(
        files("memtrain.recipes.peers").joinpath("keys", f"{name}.toml").read_text("utf-8")
    )
    tool, sentences = read.pop("tool"), read.pop("sentences", {})
    values, assumed = read.pop("values", {}), read.pop("assumed", {})
    rows = {
        key: _row(key, heading, given, sentences)
        for heading, section in read.items()
        for key, given in section.items()
    }
    return Table(
        tool["name"],
        tool["title"],
        tool["version"],
        tool["source"],
        tool.get("reads", ""),
        rows,
        assumed,
        values,
    )


def tables() -> Iterator[Table]:
    """All of them, TRL's first."""
    yield from map(table, NAMES)


def _row(key: str, heading: str, given: str | Mapping[str, Any], sentences: Mapping[str, str]) -> Row:
    read: dict[str, Any] = {"words": given} if isinstance(given, str) else dict(given)
    read["group"] = read.pop("with", "")
    unknown = read.keys() - {one.name for one in fields(Row)}
    said = [one for one in _MEANINGS if read.get(one)]
    if unknown or len(said) > 1 or not (said or read["group"] or read.get("words")):
        raise ValueError(f"{key}: a row says one of {', '.join(_MEANINGS)}, or `with`; not {given}")
    for name in ("words", "done", "lost"):
        if (text := read.get(name, "")).startswith("$"):
            read[name] = sentences[text[1:]]
    for name in ("same", "harmless"):
        if name in read:
            read[name] = tuple(read[name])
    read["saves"] = tuple(_saving(one, sentences) for one in read.get("saves", ()))
    return Row(key=key, heading=heading, **read)


def _saving(given: Mapping[str, Any], sentences: Mapping[str, str]) -> Saving:
    read: dict[str, Any] = {
        name: tuple(cast(list[object], value)) if isinstance(value, list) else value
        for name, value in given.items()
    }
    if "value" in read and not isinstance(read["value"], tuple):
        read["value"] = (read["value"],)
    read["where"] = {key: tuple(of) for key, of in given.get("where", {}).items()}
    if read.get("learns", "").startswith("$"):
        read["learns"] = "; ".join(sentences[one[1:]] for one in read["learns"].split())
    return Saving(**read)
