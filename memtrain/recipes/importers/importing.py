"""Any configuration of another trainer -> the text of a recipe, with notes, and how the tool computes."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

from memtrain.errors import Fault, RecipeError
from memtrain.recipes.importers.as_it_was import as_it_was
from memtrain.recipes.importers.axolotl import AXOLOTL
from memtrain.recipes.importers.command_line import looks_like, read_command
from memtrain.recipes.importers.consistent import make_consistent
from memtrain.recipes.importers.engines import accelerate_file, trainers_engine
from memtrain.recipes.importers.guess import guess_method, guess_tool, is_recipe
from memtrain.recipes.importers.llamafactory import LLAMAFACTORY
from memtrain.recipes.importers.notebook import notebook_code
from memtrain.recipes.importers.python_script import read_script
from memtrain.recipes.importers.script_calls import CODE, script_config, script_method
from memtrain.recipes.importers.script_functions import functions_text
from memtrain.recipes.importers.tool import Tool, ToolReading, read_keys
from memtrain.recipes.importers.unsloth import UNSLOTH, tool_of
from memtrain.recipes.importers.verl import VERL, file_of, resolved
from memtrain.recipes.peers.table import table
from memtrain.recipes.reading.load import load_text, read_mapping
from memtrain.recipes.reading.regular_file import read_regular
from memtrain.recipes.reading.yaml_tree import plain
from memtrain.recipes.recipe import Recipe
from memtrain.recipes.trl.sampling import ONLINE
from memtrain.recipes.trl.translate import IMPORTED, METHODS, PAIRED, translate
from memtrain.recipes.trl.translation import Lost, Translation
from memtrain.recipes.trl.writing import recipe_text, shown_value

TRL = Tool(table("trl"), trainers_engine, takes_trl=True)
"""TRL itself: its groups of keys are read in `memtrain.recipes.trl`."""

TOOLS: dict[str, Tool] = {tool.name: tool for tool in (TRL, AXOLOTL, LLAMAFACTORY, UNSLOTH, VERL)}
"""Every tool by its name."""

MOST_BYTES = {".ipynb": 2**28}
"""Largest file that is read, by its ending; a notebook holds the pictures of its runs too. Taste."""


@dataclass(frozen=True, slots=True)
class Foreign:
    """A configuration of another tool, as it was read."""

    tool: Tool
    config: Mapping[str, Any]
    """Keys of the configuration; nested ones are dotted where the tool's table has them so."""
    method: str | None
    """The method, where the tool's keys do not say it."""
    processes: int
    name: str
    """The file, or `the command line`."""
    unset: Mapping[str, str] = field(default_factory=dict[str, str])
    """Keys whose value is a variable of the shell that nothing sets."""
    grows_segments: bool = False
    """The command or script lets torch's allocator grow its segments."""
    folder: Path | None = None
    """Folder of the configuration, where it is a file."""
    notes: tuple[str, ...] = ()
    """What is to be known of the reading itself."""
    code: str = ""
    """Functions of a script that judge completions, as a module."""

    @property
    def is_plain_script(self) -> bool:
        """Whether it is a script of TRL's trainers, read by Unsloth's table but without Unsloth."""
        return self.tool.name == "unsloth" and self.config.get("unsloth") is not True


@dataclass(frozen=True, slots=True)
class Imported:
    """A recipe made of another tool's configuration."""

    tool: Tool
    method: str
    text: str
    notes: list[str]
    """Sentences, for each key that is not carried over or means something else."""
    faults: list[Fault]
    """Faults that `memtrain check` would find; empty when the recipe is whole."""
    pins: Mapping[str, object] = field(default_factory=dict[str, object])
    """Settings of the tool's own computation, as keys over the recipe's."""
    recipe: Recipe | None = None
    """The recipe of the text; None with faults."""
    name: str = ""
    """Name of what was read."""
    precision_is_open: bool = False
    """Nobody wrote a precision: the tool takes bfloat16 where the card has it, else float16."""
    code: Mapping[str, str] = field(default_factory=dict[str, str])
    """Files that the recipe names and that go beside it: texts by name."""

    def whole(self) -> Recipe:
        """The recipe.

        Raises: RecipeError with what the configuration lacks.
        """
        if self.recipe is None:
            # The recipe is in no file yet: its lines are nobody's, and a key of it cannot be written.
            faults = [replace(one, where=f"{self.name}, read as a recipe") for one in self.faults]
            named = "name the model: --model owner/name"
            raise RecipeError(
                [replace(one, fix=named) if "model.path" in one.what else one for one in faults]
            )
        return self.recipe


def read_foreign(
    source: str,
    tool: str | None = None,
    method: str | None = None,
    processes: int | None = None,
    trainer: int | None = None,
) -> Foreign:
    """Reading of a file, or of the words of a command. `source`: a path, or the command itself. `trainer`:
    which one of a script that trains more than once.

    Raises: RecipeError when it cannot be read, is a recipe already, or tells no tool.
    """
    if tool is not None and tool not in TOOLS:
        raise RecipeError(f"unknown tool '{tool}'", "--tool", f"give one of {', '.join(TOOLS)}")
    path = Path(source) if len(source) < 4096 and "\n" not in source else None
    asked = _Asked(tool, method, processes, trainer)
    if path is not None and path.is_file():
        text = _text(path)
        if path.suffix == ".ipynb":
            code = notebook_code(text, path.name)
            return _with_segments(_script(code, path, asked), code)
        if path.suffix == ".py":
            return _with_segments(_script(text, path, asked), text)
        if path.suffix in (".yaml", ".yml", ".json", ".toml") or not looks_like(text):
            return _mapping(path, tool, method, processes)
        return _with_segments(_command(text, path.name, asked), text)
    if looks_like(source):
        return _with_segments(_command(source, "the command line", asked), source)
    raise RecipeError(
        f"there is no file {source}",
        "the command line",
        "name a configuration, a script, or paste a command line",
    )


@dataclass(frozen=True, slots=True)
class _Asked:
    """The options of a reading."""

    tool: str | None
    method: str | None
    processes: int | None
    trainer: int | None


def _with_segments(found: Foreign, text: str) -> Foreign:
    """The same, with the allocator's variable where a line sets it (PYTORCH_CUDA_ALLOC_CONF)."""
    grows = re.search(r"^[^#\n]*expandable_segments:\s*True", text, re.M) is not None
    return replace(found, grows_segments=grows or found.grows_segments)


def _text(path: Path) -> str:
    try:
        if path.stat().st_size > MOST_BYTES.get(path.suffix, 2**20):
            raise RecipeError(f"{path} is longer than a configuration", str(path), "name the configuration")
        return read_regular(path)
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path} cannot be read: {error}", str(path), "name a text file") from None


def _script(text: str, path: Path, asked: _Asked, given: Mapping[str, Any] = MappingProxyType({})) -> Foreign:
    read = script_config(text, path.name, given, asked.method, asked.trainer)
    used = TOOLS[asked.tool or "unsloth"]
    if used is UNSLOTH:
        used = tool_of(read)
    notes = tuple(read.notes)
    code = ""
    if read.rewards:
        code, lost = functions_text(read.script, read.rewards, path.name, read.line)
        without = [one for several in lost.values() for one in several]
        names = [one for one in read.rewards if one not in without]
        given_weights = read.keys.get("reward_weights")
        listed = cast(list[Any], given_weights) if isinstance(given_weights, list) else []
        weights = dict(zip(read.rewards, listed, strict=False))
        ready = [one for one in without if one in _OF_TRL]
        if ready:
            read.keys["reward_funcs"] = ready
            lost = {why: [one for one in several if one not in ready] for why, several in lost.items()}
            lost = {why: several for why, several in lost.items() if several}
        if weights:
            read.keys["reward_weights"] = [weights[one] for one in (*ready, *names) if one in weights]
        notes += tuple(
            f"rewards: not written into a file, {why}: {', '.join(several)}" for why, several in lost.items()
        )
        if code:
            read.keys[CODE] = names
        if not lost:
            del read.keys["trainer.reward_funcs"]
    return Foreign(used, read.keys, read.method, asked.processes or 1, path.name, notes=notes, code=code)


_OF_TRL = ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward")
"""Reward functions that come with TRL."""


def _mapping(path: Path, tool: str | None, method: str | None, processes: int | None) -> Foreign:
    config = _toml(path) if path.suffix == ".toml" else _as_numbers(plain(read_mapping(path)))
    if is_recipe(config):
        raise RecipeError(
            f"{path} is already a recipe of memtrain", str(path), f"run `memtrain check {path}`"
        )
    return _foreign(config, [], path.name, tool, method, processes, folder=path.parent)


def _as_numbers(value: Any) -> Any:
    """Numbers with `_` between their digits, which YAML 1.1 has (as the tools read it) and 1.2 has not."""
    if isinstance(value, dict):
        return {key: _as_numbers(one) for key, one in cast(dict[str, Any], value).items()}
    if isinstance(value, list):
        return [_as_numbers(one) for one in cast(list[Any], value)]
    is_number = isinstance(value, str) and re.fullmatch(r"[-+]?[1-9][0-9]*(_[0-9]+)+", value)
    return int(value) if is_number else value


def _toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(_text(path))
    except tomllib.TOMLDecodeError as error:
        raise RecipeError(f"{path} is not valid TOML: {error}", str(path), "fix the file") from None


def _command(text: str, name: str, asked: _Asked) -> Foreign:
    command = read_command(text, name)
    if command.absent:
        raise RecipeError(
            f"the command names {command.absent[0]}, which is not here",
            name,
            "give the file itself, or run this where the file is",
        )
    config: dict[str, Any] = {}
    for file in command.files:
        config |= cast(dict[str, Any], plain(read_mapping(file)))
    config |= dict(_switches(command.keys))
    engine = config.get("accelerate_config")
    number = command.processes
    if isinstance(engine, str) and Path(engine).is_file():
        named, said = accelerate_file(Path(engine))
        config["accelerate_config"] = named or engine
        number = number or said
    script = command.script
    if script is not None and (own := _own_arguments(script, config)) is not None:
        # The script's own calls say all.
        rest = {key: value for key, value in config.items() if key not in own}
        read = _script(_text(script), script, replace(asked, processes=asked.processes or number), own)
        return replace(read, config={**read.config, **rest})
    if script is not None and asked.method is None:
        asked = replace(asked, method=script_method(_text(script), script.name))
    folder = command.files[0].parent if command.files else None
    number = asked.processes or number
    return _foreign(config, command.words, name, asked.tool, asked.method, number, command.unset, folder)


def _own_arguments(script: Path, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Arguments of a command that its script reads itself; None where others say how to train."""
    own = read_script(_text(script), script.name).own
    given = {key: value for key, value in config.items() if key in own.arguments}
    return given if config.keys() - given.keys() <= {"accelerate_config", "deepspeed"} else None


def _switches(keys: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Keys of a command; `--no_x`, which transformers' parser has for every switch, is `x: false`."""
    for key, value in keys.items():
        off = key.removeprefix("no_")
        is_off = off != key and value is True and key not in table("trl") and off in table("trl")
        yield (off, False) if is_off else (key, value)


def _foreign(
    config: dict[str, Any],
    words: list[str],
    name: str,
    tool: str | None,
    method: str | None,
    processes: int | None,
    unset: Mapping[str, str] = MappingProxyType({}),
    folder: Path | None = None,
) -> Foreign:
    dotted = flat(config)
    found = TOOLS[tool or guess_tool({**dotted, **unset}, words, name)]
    if found is VERL:
        config, nowhere = resolved(flat(file_of(dotted)) | dotted)
        unset = {**unset, **nowhere}
    elif found is AXOLOTL:
        config = flat(config, only=("trl", "vllm"))
    if method is None and found is TRL:
        method = guess_method(
            {**config, **unset}, words, name, "" if folder is None else folder.resolve().name
        )
    reading = config.get("num_processes")
    number = processes or (reading if isinstance(reading, int) else 1)
    return Foreign(found, config, method, number, name, unset, folder=folder)


def flat(config: Mapping[str, Any], above: str = "", only: tuple[str, ...] = ()) -> dict[str, Any]:
    """Dotted keys; `only`: of these sections alone."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        path = f"{above}{key}"
        if isinstance(value, Mapping) and value and (not only or above or key in only):
            found |= flat(cast(Mapping[str, Any], value), f"{path}.", only)
        else:
            found[path] = value
    return found


UNSET = "a variable that nothing sets: the default is taken"
"""Reason why a key is not carried over, where its value is a variable of the shell."""

STAND_INS: Mapping[str, object] = {
    "data.train": "rows.jsonl",
    "rewards.functions": [{"function": "exact_answer"}],
}
"""Keys that a configuration need not say to be planned: no row is read for it."""

_PLANNED = ("memory.", "model.attention", "model.liger", "length.padding_free", "generate.vllm.memory_share")
_ALSO_PLANNED = (
    "generate.vllm.sleep",
    "generate.vllm.eager",
    "cluster.engine",
    "cluster.cpu_offload",
    "cluster.processes",
)
"""Keys that the planner chooses where nobody says them."""


def import_config(
    foreign: Foreign, output: str = "recipe.yaml", *, has_stand_ins: bool = False, frees: bool = False
) -> Imported:
    """The recipe of a configuration. `output`: the file that it is for, as errors name it.

    `has_stand_ins`: rows and rewards that nobody names are made up. `frees`: what the planner can choose is
    left to it, as `memtrain rescue` does.

    Raises: RecipeError for a method that has no counterpart.
    """
    tool = foreign.tool
    reading = read_keys(tool, foreign.config, foreign.processes, foreign.folder, foreign.method)
    reading.lost += [Lost(key, text, UNSET) for key, text in foreign.unset.items()]
    reading.notes += foreign.notes
    if foreign.method is not None:
        reading.method = foreign.method
    if reading.method not in (*METHODS, *PAIRED):
        raise RecipeError(
            f"the method '{reading.method}' has no counterpart in memtrain",
            foreign.name,
            f"give one of {', '.join(IMPORTED)} with --method",
        )
    trainer = reading.method
    made = translated(tool, reading)
    code = {} if has_stand_ins else _with_code(foreign, made, output)
    reading.method = made.method
    if trainer in PAIRED:
        reading.trl["loss_type"] = made.recipe_keys["dpo.loss"][0]
    pins = as_it_was(tool, reading, made)
    make_consistent(made)
    if has_stand_ins:
        _stand_in(made)
    if pins.get("optim.master_weights") is False:
        made.notes.append(
            f"dtype: bfloat16: {tool.title} steps such weights without float32 copies, which loses small "
            "updates; here they have copies (optim.master_weights: false leaves them out)"
        )
    if frees:
        _free(made, reading.processes)
    elif reading.processes > 1 and "cluster.processes" not in made.recipe_keys:
        made.recipe_keys["cluster.processes"] = (reading.processes, "")
    command = "rescue" if frees else "import"
    text = recipe_text(made, foreign.name, f"{tool.title}'s {trainer}", command)
    recipe: Recipe | None = None
    faults: list[Fault] = []
    try:
        recipe = load_text(text, output).recipe
    except RecipeError as error:
        faults = list(error.faults)
    return Imported(
        tool,
        reading.method,
        text,
        _notes(made),
        faults,
        pins,
        recipe,
        foreign.name,
        precision_is_open=reading.precision_is_open,
        code=code,
    )


def _with_code(foreign: Foreign, made: Translation, output: str) -> dict[str, str]:
    """Name the functions of a script in the rewards; the file that they are written into, and its text."""
    names = cast(list[str], foreign.config.get(CODE, []))
    if not names or made.method not in ONLINE:
        return {}
    file = f"{Path(output).stem}_rewards.py"
    there = cast(list[object], made.recipe_keys.get("rewards.functions", ([], ""))[0])
    given = made.config.get("reward_weights")
    weights = cast(list[object], given) if isinstance(given, list) else []
    asked: list[dict[str, object]] = [{"function": f"./{file}:{name}"} for name in names]
    for one, weight in zip(asked, weights[len(there) :], strict=False):
        one["weight"] = weight
    made.set("rewards.functions", [*there, *asked])
    made.notes.append(f"rewards: functions of the script are in {file}, beside the recipe")
    return {file: foreign.code}


def _stand_in(made: Translation) -> None:
    for key, value in STAND_INS.items():
        if key.startswith("rewards.") and made.method not in ("grpo", "rloo", "ppo"):
            continue
        if key not in made.recipe_keys:
            made.recipe_keys[key] = (value, "put yours in its place")


def _free(made: Translation, processes: int) -> None:
    for key in [*made.recipe_keys]:
        if key.startswith(_PLANNED) or key in _ALSO_PLANNED:
            del made.recipe_keys[key]
    if processes > 1:
        made.recipe_keys["cluster.processes"] = (processes, "")


def translated(tool: Tool, reading: ToolReading) -> Translation:
    """The keys of the recipe: by TRL's rules, and keys that TRL lacks; keys may clash."""
    made = translate(
        reading.trl,
        reading.method,
        reading.processes // reading.sharing,
        reading.assumed,
        f"{tool.title}'s default",
    )
    if not tool.takes_trl and "assistant_only_loss" not in reading.trl:
        # TRL's default of every turn is not that of other tools.
        made.recipe_keys.pop("data.assistant_only_loss", None)
    renamed = [
        Lost(reading.names.get(one.key, one.key), one.value, one.why.replace("TRL", tool.title))
        for one in made.lost
        if one.key not in reading.assumed
    ]
    made.lost = [*reading.lost, *renamed]
    model = str(reading.trl.get("model_name_or_path", ""))
    if re.search(r"(?<![a-z])(gptq|awq|aqlm|eetq|hqq)(?![a-z])", model, re.I):
        reading.notes.append(f"model.path: {model} holds rounded weights: name the model that they are of")
    made.notes = [*reading.notes, *(note.replace("TRL", tool.title) for note in made.notes)]
    made.recipe_keys = {
        key: (value, comment.replace("TRL", tool.title)) for key, (value, comment) in made.recipe_keys.items()
    } | reading.direct
    return made


def unset_words(unset: Mapping[str, str]) -> str:
    """A sentence on the keys whose value is a variable that nothing sets."""
    listed = ", ".join(f"{text} ({key})" for key, text in unset.items())
    return f"Nothing sets {listed}: the defaults are taken (NAME=value before the command sets one)."


def _notes(made: Translation) -> list[str]:
    lines = [
        f"{one.key}: {shown_value(one.value)} is not carried over: {one.why}{'.' * (one.why[-1:] != '?')}"
        for one in made.lost
        if one.why != UNSET
    ]
    unset = {one.key: str(one.value) for one in made.lost if one.why == UNSET}
    if unset:
        lines.insert(0, unset_words(unset))
    return lines + [f"note: {note}." for note in made.notes]
