"""Words of a run as a page for everyone may hold them: no markup of a name, no place of this machine."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import cast

from pydantic import JsonValue

from memtrain.errors import printable
from memtrain.memory.plan.plan import Plan
from memtrain.recipes.reading.environment import hidden

OF_ONE_MACHINE = {
    "run_dir": None,
    "cluster": None,
    "log": None,
    "data": {"cache_dir": None},
    "generate": {"vllm": {"python": None, "server": None, "shared_dir": None, "devices": None}},
    "distill": {"teacher_server": None, "top_k_file": None},
}
"""Keys of a recipe that say where it ran, and nothing of what was trained."""

_MARKS = re.compile(r"[\\`*_{}\[\]<&#!|~$:@]")
PLACES = frozenset(
    (
        "source",
        "path",
        "tokenizer",
        "chat_template",
        "config",
        "function",
        "functions",
        "environment",
        "teacher",
    )
)
"""Keys whose text is a file, a folder or a hub id, in any section."""

_PATH = re.compile(r"(?<![\w<:/.])(?:~|/[\w.-]+)(?:/[\w.-]+)*/(?=[\w.-])")
"""The folders of a path from the root or from home, inside other text."""


def plain(text: str) -> str:
    """Text of anyone as a line of Markdown shows it: letters alone, without markup, HTML and links."""
    line = printable(text, is_line=True)
    shown = _MARKS.sub(lambda found: f"&#{ord(found[0])};", line)
    shown = re.sub(r"(?i)\bwww\.", lambda found: f"{found[0][:-1]}&#46;", shown)
    # What would begin a list, a number or a line across.
    begun = re.compile(r"^(\s*)([-+=]|\d+[.)](?=\s|$))")
    return begun.sub(lambda found: f"{found[1]}&#{ord(found[2][0])};{found[2][1:]}", shown)


def code(text: str) -> str:
    """Text of anyone as code in a line of Markdown, a cell of a table included."""
    line = printable(text, is_line=True).replace("|", "\\|")
    ticks = max((len(run) for run in re.findall("`+", line)), default=0) + 1
    space = " " if ticks > 1 else ""
    return f"{'`' * ticks}{space}{line}{space}{'`' * ticks}"


def public_place(name: str) -> str:
    """A hub id or a built-in name as it is; of a file or a folder of this machine its last name."""
    if is_hub_id(name) or re.match(r"\w+:(?!//|\\)\S*$", name) or not re.search(r"[/\\]", name):
        return name
    path, _, function = name.partition(":") if re.match(r"[^:]*\.py:", name) else (name, "", "")
    kind = PureWindowsPath if "\\" in path else PurePosixPath
    return kind(path).name + (f":{function}" if function else "")


def public_recipe(plan: Plan) -> dict[str, JsonValue]:
    """What the recipe of a run says beside its defaults, without places and text of the environment."""
    given = plan.recipe.model_dump(mode="json", exclude_defaults=True)
    kept = _without(hidden(given, plan.environment), OF_ONE_MACHINE)
    return cast(dict[str, JsonValue], _public(kept))


def _without(tree: dict[str, JsonValue], gone: dict[str, object]) -> dict[str, JsonValue]:
    kept: dict[str, JsonValue] = {}
    for key, value in tree.items():
        below = gone.get(key, {})
        if below is None:
            continue
        if isinstance(value, dict) and below:
            value = cast(JsonValue, _without(value, cast(dict[str, object], below)))
            if not value:
                continue
        kept[key] = value
    return kept


def _public(value: JsonValue, key: str = "") -> JsonValue:
    """`value`, of a key or in its list, without folders of this machine."""
    if isinstance(value, dict):
        return {name: _public(one, name) for name, one in value.items()}
    if isinstance(value, list):
        return [_public(one, key) for one in value]
    if not isinstance(value, str):
        return value
    return public_place(value) if key in PLACES else _PATH.sub("", value)


def is_hub_id(name: str) -> bool:
    """Whether a name is `owner/name` on the hub, and neither a file, a folder nor a built-in."""
    is_data_file = re.search(r"\.(jsonl?|csv|parquet|arrow|txt)(\.gz)?$", name) is not None
    is_id = re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", name) is not None
    return is_id and not is_data_file and not Path(name).exists()
