"""A tool whose configurations are read: its table of keys, its defaults, and the reading of keys together."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from memtrain.recipes.trl.keys import KEYS as TRL_KEYS
from memtrain.recipes.trl.rules import Automatic, ReadTogether, RecipeKey, Rule, Unmapped
from memtrain.recipes.trl.translation import Lost


@dataclass(frozen=True, slots=True)
class TrlKey:
    """The value is that of a key of TRL, whose rule then applies.

    `values`: other words for its values; a value that maps to None is left out.
    """

    key: str
    values: Mapping[object, object] = field(default_factory=dict[object, object])


ToolRule = TrlKey | Rule


@dataclass(slots=True)
class ToolReading:
    """A configuration of another tool in TRL's keys, as far as TRL has them."""

    config: Mapping[str, Any]
    """Keys of the tool, nested ones dotted."""
    processes: int
    folder: Path | None = None
    """Folder of the configuration, where it is a file."""
    method: str = "sft"
    has_turns: bool = False
    """Rows of a source are conversations of several turns."""
    trl: dict[str, Any] = field(default_factory=dict[str, Any])
    names: dict[str, str] = field(default_factory=dict[str, str])
    """Key of the tool by TRL's."""
    assumed: set[str] = field(default_factory=set[str])
    """Keys of `trl` that nobody wrote: the tool's defaults."""
    direct: dict[str, tuple[object, str]] = field(default_factory=dict[str, tuple[object, str]])
    """Keys of the recipe that TRL has none for, each with a comment (or "")."""
    computed: dict[str, object] = field(default_factory=dict[str, object])
    """Keys of the recipe for how the tool computes, where that is not as transformers' trainer does."""
    precision_is_open: bool = False
    """The tool computes in bfloat16 where the card has it, else in float16: nothing says which."""
    lost: list[Lost] = field(default_factory=list[Lost])
    notes: list[str] = field(default_factory=list[str])

    def get(self, key: str, default: Any = None) -> Any:
        """Value of a key; the default where it is not written, or empty."""
        value = self.config.get(key)
        return default if value is None or value == "" else value

    def on(self, key: str) -> bool:
        """Whether a switch is written and on."""
        value = self.config.get(key)
        return value is True or (isinstance(value, str) and value.lower() == "true")

    def set_trl(self, key: str, value: object, of: str = "") -> None:
        """Set a key of TRL; `of`: the key that it comes from."""
        self.trl[key] = value
        if of:
            self.names[key] = of

    def set_recipe(self, key: str, value: object, comment: str = "") -> None:
        """Set a key of the recipe that TRL has no key for."""
        self.direct[key] = (value, comment)

    def lose(self, key: str, why: str) -> None:
        """Note that a key which is written has no counterpart."""
        value = self.config.get(key)
        self.lost.append(Lost(key, str(value) if isinstance(value, str) else value, why))

    def add_tokens(self, tokens: list[str]) -> None:
        """Set the tokens that the tokenizer lacks; beside an adapter the embeddings are trained."""
        self.set_recipe("model.add_tokens", list(dict.fromkeys(tokens)))
        if self.trl.get("use_peft") is True and "lora_modules_to_save" not in self.trl:
            self.set_trl("lora_modules_to_save", ["embed_tokens", "lm_head"])
        self.notes.append(
            "model.add_tokens takes new tokens alone: remove what the tokenizer has already. Their "
            "embeddings begin as the mean of all others"
        )


@dataclass(frozen=True, slots=True)
class Tool:
    """Tool whose configurations are read."""

    name: str
    """Name, as `--tool` takes it."""
    title: str
    """Name, as people write it."""
    version: str
    """Of the schema that the table was held against."""
    keys: Mapping[str, ToolRule]
    """The table; a key with `*` stands for all that it matches."""
    read: Callable[[ToolReading], None]
    """Reading of keys that mean something together; sets the method."""
    defaults: Mapping[str, Any]
    """Defaults of the tool in TRL's words, where TRL takes something else."""
    takes_trl: bool = False
    """Keys of transformers and TRL are keys of it too."""

    def rule(self, key: str) -> ToolRule | None:
        """The rule of a key; None for an unknown key."""
        if key in self.keys:
            return self.keys[key]
        pattern = next((one for one in self.keys if "*" in one and fnmatchcase(key, one)), None)
        if pattern is not None:
            return self.keys[pattern]
        return TrlKey(key) if self.takes_trl and key in TRL_KEYS else None


def read_keys(
    tool: Tool, config: Mapping[str, Any], processes: int, folder: Path | None = None
) -> ToolReading:
    """A configuration in TRL's words.

    Raises: RecipeError for a method that memtrain has no counterpart for.
    """
    reading = ToolReading(config, processes, folder)
    for key, value in config.items():
        _one(tool, reading, key, value)
    tool.read(reading)
    for key, value in tool.defaults.items():
        if key not in reading.trl:
            reading.trl[key] = value
            reading.assumed.add(key)
    return reading


def _one(tool: Tool, reading: ToolReading, key: str, value: object) -> None:
    match tool.rule(key):
        case TrlKey(key=name, values=values):
            taken = _word(value, values)
            if taken is not None:
                reading.set_trl(name, taken, key)
        case RecipeKey(key=name, values=values):
            taken = _word(value, values)
            if taken is not None:
                reading.set_recipe(name, taken)
        case Unmapped(why=why, harmless=harmless):
            if not any(type(one) is type(value) and one == value for one in (*harmless, "", None)):
                reading.lose(key, why)
        case Automatic() | ReadTogether():
            pass
        case None:
            if value is None:
                return  # Nothing is written there.
            near = difflib.get_close_matches(key, tool.keys, n=1)
            asks = f"; did you mean {near[0]}?" if near else ""
            reading.lose(key, f"not a known key of {tool.title}{asks}")


def _word(value: object, values: Mapping[object, object]) -> object:
    if value == "":
        return None
    for old, new in values.items():
        if isinstance(old, bool) is isinstance(value, bool) and old == value:
            return new
    return value
