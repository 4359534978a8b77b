"""A pasted command line: the launcher's devices, and the trainer's arguments as keys."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import yaml

from memtrain.errors import RecipeError
from memtrain.recipes.importers.shell import commands, names_in

_DEVICES = ("--num_processes", "--nproc_per_node", "--nproc-per-node", "--num_gpus", "--num-processes")
_OF_ALL = ("--num_processes", "--num-processes")
"""Of `_DEVICES`, accelerate's, which counts those of all its machines."""
_NODES = ("--nnodes", "--num_machines", "--num_nodes")
_OF_ENVIRONMENT = ("CUDA_VISIBLE_DEVICES", "NPROC_PER_NODE", "NNODES")
"""Variables that say how many devices there are; the latter two are LLaMA-Factory's own."""
_LAUNCHERS = {
    "dynamo_backend",
    "gpu_ids",
    "log_dir",
    "machine_rank",
    "main_process_ip",
    "main_process_port",
    "master_addr",
    "master_port",
    "max_restarts",
    "monitor_interval",
    "multi_gpu",
    "node_rank",
    "num_cpu_threads_per_process",
    "rdzv_backend",
    "rdzv_endpoint",
    "rdzv_id",
    "same_network",
    "standalone",
    "tee",
    "use_deepspeed",
}
"""Arguments of launchers (accelerate, torchrun, deepspeed) that say where processes are, and nothing of the
training."""


_STARTS = r"^\s*([A-Z_]+=\S*\s+)*(accelerate launch|torchrun|deepspeed|python3?|axolotl|trl)\s+\S"
"""Beginnings of a command that trains and has no argument of its own."""


@dataclass(slots=True)
class CommandLine:
    """Keys and values of a command line."""

    words: list[str]
    """The programs and files, in their order."""
    keys: dict[str, Any] = field(default_factory=dict[str, Any])
    """The trainer's arguments: `--key value`, `key=value`."""
    processes: int | None = None
    unset: dict[str, str] = field(default_factory=dict[str, str])
    """Arguments whose value is a variable that nothing sets."""
    files: list[Path] = field(default_factory=list[Path])
    """YAML files that it names and that are here."""

    @property
    def script(self) -> Path | None:
        """The script that it runs, where that is here."""
        found = [Path(word) for word in self.words if word.endswith(".py")]
        return next((path for path in found if path.is_file()), None)

    @property
    def absent(self) -> list[str]:
        """Configurations that it names and that are not here."""
        return [word for word in self.words if word.endswith((".yaml", ".yml")) and not Path(word).is_file()]


def looks_like(text: str) -> bool:
    """Whether a text is a command line, or a shell script of one."""
    words = r"(^|\s)--[A-Za-z][\w.-]*[ =]|(^|\s)[\w.]+\.[\w.]+=\S|llamafactory-cli|verl\.trainer"
    return re.search(f"{words}|{_STARTS}", text, re.M) is not None


def read_command(text: str, name: str) -> CommandLine:
    """The command that trains: of several in a script, the one with the most arguments.

    Raises: RecipeError when its quotes do not close.
    """
    try:
        read = [(one, _parsed(one.words, one.known)) for one in commands(text)]
    except ValueError as error:
        raise RecipeError(
            f"the command cannot be read: {error}", name, "close its quotes, or paste it alone"
        ) from None
    if not read:
        raise RecipeError(f"{name} holds no command", name, "paste the command that trains")
    command, best = max(read, key=lambda one: len(one[1].keys))
    others = [made for one, made in read if one.branch == command.branch and made is not best]
    if command.branch and any(
        made.keys.keys() & best.keys.keys() and made.keys != best.keys for made in others
    ):
        raise RecipeError(
            f"which command trains depends on `{command.branch.splitlines()[0][:80]}`, which nothing decides",
            name,
            "set its variables (NAME=value before the command), or paste the command alone",
        )
    _leave_unset(best)
    return best


def _leave_unset(made: CommandLine) -> None:
    """Take away values with a variable that nothing sets; a path keeps its last part where that has none."""
    for key, value in [*made.keys.items()]:
        text = " ".join(map(str, cast(list[Any], value))) if isinstance(value, list) else str(value)
        if not names_in(text):
            continue
        last = text.rstrip("/").rpartition("/")[2]
        if "$((" in text or names_in(last) or last == text or isinstance(value, list):
            del made.keys[key]
            made.unset[key] = text
        else:
            made.keys[key] = last


def _parsed(words: list[str], known: Mapping[str, str]) -> CommandLine:
    made = CommandLine([])
    is_of_all = False
    said, at = {key: known[key] for key in _OF_ENVIRONMENT if key in known}, 0
    while at < len(words):
        word = words[at]
        flag, has_value, value = word.partition("=")
        if flag in _OF_ENVIRONMENT and has_value and not made.words:
            said[flag] = value  # A variable of the environment.
        elif word.startswith("--"):
            if not has_value:
                at, value = _argument(words, at)
            if flag in _DEVICES and str(value).isdigit():
                made.processes = int(value)
                is_of_all = flag in _OF_ALL
            elif flag in _NODES and str(value).isdigit():
                said["NNODES"] = str(value)
            elif flag == "--config_file":
                made.keys["accelerate_config"] = value
            elif flag == "--config" and str(value).endswith((".yaml", ".yml")):
                _name_file(made, str(value))
            else:
                made.keys[flag.removeprefix("--").replace("-", "_")] = _value(value)
        elif has_value and not made.words and re.fullmatch(r"[A-Z_][A-Z0-9_]*", flag):
            pass  # A variable of the environment.
        elif has_value and re.fullmatch(r"\+{0,2}[A-Za-z_][\w.]*", flag):
            made.keys[flag.lstrip("+")] = _value(value)
        elif re.fullmatch(r"~[A-Za-z_][\w.]*(=.*)?", word):
            made.keys.pop(flag.lstrip("~"), None)  # Hydra's: the key is taken out.
        else:
            if word.endswith(".py") or made.words[-1:] == ["-m"]:
                _take_launchers(made)
            _name_file(made, word)
        at += 1
    _count_devices(made, said, is_of_all=is_of_all)
    return made


def _count_devices(made: CommandLine, said: Mapping[str, str], *, is_of_all: bool) -> None:
    """Set the number of processes by the launcher's arguments, else by variables; those of all nodes."""
    visible = [one for one in said.get("CUDA_VISIBLE_DEVICES", "").split(",") if one.strip()]
    if made.processes is None and said.get("NPROC_PER_NODE", "").isdigit():
        made.processes = int(said["NPROC_PER_NODE"])
    elif made.processes is None and visible:
        made.processes = len(visible)
    if made.processes is not None and not is_of_all and said.get("NNODES", "").isdigit():
        made.processes *= int(said["NNODES"])


def _name_file(made: CommandLine, word: str) -> None:
    """Take a word that is no argument, and the file that it names."""
    made.words.append(word)
    if word.endswith((".yaml", ".yml")) and Path(word).is_file():
        made.files.append(Path(word))


def _take_launchers(made: CommandLine) -> None:
    """Read what was said before the program: the launcher's arguments, as the engine and its devices."""
    stage = made.keys.pop("zero_stage", None)
    if stage in (1, 2, 3):
        made.keys["accelerate_config"] = f"zero{stage}"
    if (file := made.keys.pop("deepspeed_config_file", None)) is not None:
        made.keys["deepspeed"] = file
    named = re.fullmatch(r"[\w.]+:([\d,]+)", str(made.keys.pop("include", "")))
    if named is not None:
        made.processes = len(named[1].split(","))
    made.keys = {key: value for key, value in made.keys.items() if key not in _LAUNCHERS}


def _argument(words: list[str], at: int) -> tuple[int, Any]:
    """(where the argument ends, its value): one word, several of a list, or a switch."""
    taken: list[str] = []
    while (
        at + 1 < len(words)
        and not words[at + 1].startswith("--")
        and "=" not in words[at + 1].partition(".")[0]
    ):
        at += 1
        taken.append(words[at])
        if words[at].endswith(".py"):
            taken.pop()
            at -= 1
            break
    if not taken:
        return at, True
    return at, taken[0] if len(taken) == 1 else taken


def _value(text: Any) -> Any:
    """The value of a word, as YAML reads it; `1e-4` is a number."""
    if isinstance(text, list):
        return [_value(one) for one in cast(list[Any], text)]
    if not isinstance(text, str):
        return text
    try:
        return float(text) if re.fullmatch(r"-?\d+(\.\d+)?[eE][+-]?\d+", text) else yaml.safe_load(text)
    except (yaml.YAMLError, ValueError):
        return text
