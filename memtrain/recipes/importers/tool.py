"""A tool whose configurations are read: its table of keys, its defaults, and the reading of keys together."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from memtrain.errors import RecipeError
from memtrain.recipes.peers.table import Row, Same, Table, table
from memtrain.recipes.reading.adapter_config import ADAPTER_FILE
from memtrain.recipes.trl.translation import Lost


@dataclass(slots=True)
class ToolReading:
    """A configuration of another tool in TRL's keys, as far as TRL has them."""

    config: Mapping[str, Any]
    """Keys of the tool, nested ones dotted."""
    processes: int
    folder: Path | None = None
    """Folder of the configuration, where it is a file."""
    sharing: int = 1
    """Processes that hold the same rows together."""
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

    def go_on_from(self, key: str, folder: str) -> bool:
        """Set the trained adapter that the run goes on from, where it is here; whether it is."""
        is_here = any((Path(folder) / one / ADAPTER_FILE).is_file() for one in (".", "final"))
        if is_here:
            self.set_recipe("model.adapter.path", folder)
        else:
            self.lose(key, "the adapter is not here: where it is, set `model.adapter.path` to it")
        return is_here

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

    table: Table
    read: Callable[[ToolReading], None]
    """Reading of keys that mean something together; sets the method."""
    takes_trl: bool = False
    """Keys of transformers and TRL are keys of it too."""

    @property
    def name(self) -> str:
        """Name, as `--tool` takes it."""
        return self.table.name

    @property
    def title(self) -> str:
        """Name, as people write it."""
        return self.table.title

    @property
    def version(self) -> str:
        """Of the schema that the table was held against."""
        return self.table.version

    def row(self, key: str) -> Row | None:
        """The row of a key; None for an unknown key."""
        trl = table("trl")
        found = None if self.table is trl else self.table.row(key)
        if found is None and self.takes_trl and (found := trl.row(key)) is not None:
            return found if found.group == "engine" else Row(key, found.heading, trl=key)
        return found


def read_keys(
    tool: Tool,
    config: Mapping[str, Any],
    processes: int,
    folder: Path | None = None,
    method: str | None = None,
) -> ToolReading:
    """A configuration in TRL's words. `method`: the method, where the configuration itself does not say it.

    Raises: RecipeError for a method that memtrain has no counterpart for.
    """
    reading = ToolReading(config, processes, folder, method=method or "sft")
    for key, value in config.items():
        _one(tool, reading, key, value)
    tool.read(reading)
    if tool.table is not table("trl"):
        for key, value in tool.table.defaults(reading.method).items():
            if key not in reading.trl:
                reading.trl[key] = value
                reading.assumed.add(key)
    return reading


def _one(tool: Tool, reading: ToolReading, key: str, value: object) -> None:
    row = tool.row(key)
    if row is None:
        if value is None:
            return  # Nothing is written there.
        near = difflib.get_close_matches(key, tool.table.rows, n=1)
        asks = f"; did you mean {near[0]}?" if near else ""
        reading.lose(key, f"not a known key of {tool.title}{asks}")
    elif row.lost:
        if not row.group and not row.is_harmless(value):
            reading.lose(key, row.lost)
    elif row.is_carried and value != "":
        taken = row.taken(value)
        if taken is Same or taken is None:
            return
        if row.trl:
            reading.set_trl(row.trl, taken, key)
        else:
            reading.set_recipe(row.to, taken)


def no_counterpart(key: str, value: object, known: Iterable[str]) -> RecipeError:
    """The error about a value of a tool's key that is none of the `known` ones."""
    return RecipeError(
        f"{key}: {value} has no counterpart in memtrain", key, f"give one of {', '.join(known)}"
    )
