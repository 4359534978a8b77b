"""Bare values of a recipe without the keys at fault: rules between its other keys are checked too."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

from memtrain.recipes.reading.yaml_tree import Path, dotted

STAND_INS: Mapping[Path, object] = {
    ("model",): {"path": "builtin:tiny"},
    ("model", "path"): "builtin:tiny",
    ("data",): {"train": "builtin:arithmetic"},
    ("data", "train"): "builtin:arithmetic",
    ("rewards",): {"functions": "exact_answer"},
}
"""Values in the place of required keys that are missing or wrong; no fault of theirs is shown."""


def named_keys(message: str, path: Path) -> list[Path]:
    """Keys that the sentence of a rule may name: dotted ones, and words as keys of the section at `path`.

    Of a rule of the whole recipe, only the first word may be a section: others are plain words (`model`).
    """
    words = [word.strip("`'\",;:()") for word in message.split()]
    return [
        tuple(word.split(".")) if "." in word else (*path, word)
        for at, word in enumerate(words)
        if word and ("." in word or path or at == 0)
    ]


def missing_section(message: str) -> Path | None:
    """The section that a rule asks for and that has a stand-in; None where it asks for none."""
    words = {word.strip("`'\",;:()") for word in message.split()}
    return next((path for path in STAND_INS if len(path) == 1 and path[0] in words), None)


def without(bare: object, paths: Iterable[Path]) -> dict[str, object] | None:
    """The values without those at `paths`, required ones replaced; None where the method itself is at fault,
    on which every other rule depends."""
    kept = _copy(bare)
    for path in paths:
        whole = _up_to_a_list(path)
        if not whole or whole == ("method",):
            return None
        _remove(kept, whole)
    return kept


def _up_to_a_list(path: Path) -> Path:
    """The path up to the key of a list that it leads into: an item alone cannot be removed."""
    numbers = [at for at, part in enumerate(path) if isinstance(part, int)]
    return path[: numbers[0]] if numbers else path


def _remove(bare: dict[str, object], path: Path) -> None:
    node = bare
    for part in path[:-1]:
        inner = node.get(str(part))
        if not isinstance(inner, dict):
            return
        node = cast(dict[str, object], inner)
    node.pop(str(path[-1]), None)
    if path in STAND_INS and not (dotted(path) == "model.path" and node.get("config") is not None):
        node[str(path[-1])] = STAND_INS[path]


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copy(one) for key, one in cast(dict[str, Any], value).items()}
    return value
