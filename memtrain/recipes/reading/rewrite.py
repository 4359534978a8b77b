"""A recipe file with today's names in the place of previous ones; every comment and space stays."""

from __future__ import annotations

import codecs
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from memtrain.errors import RecipeError
from memtrain.recipes.reading.previous_names import renewed
from memtrain.recipes.reading.yaml_reader import read_yaml
from memtrain.recipes.reading.yaml_tree import Faults, Node, Place, Renaming, plain

_LINE = re.compile("\r\n|[\n\r\x85\u2028\u2029]")
_BEFORE = re.compile(r"(?:[&!]\S*\s+)*[\"']?")


def rewrite(path: Path, renamed: Sequence[Renaming]) -> int:
    """Write today's names into a file in place of the `renamed` names in it; their number.

    Raises: RecipeError when a word cannot be replaced by itself, or the file cannot be written.
    """
    raw = path.read_bytes()
    mark = codecs.BOM_UTF8 if raw.startswith(codecs.BOM_UTF8) else b""
    text = raw.removeprefix(mark).decode("utf-8")
    made, count = rewritten(text, renamed)
    target = path.resolve()
    unfinished = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        unfinished.write_bytes(mark + made.encode("utf-8"))
        shutil.copymode(target, unfinished)
        os.replace(unfinished, target)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise RecipeError(
            f"{path} cannot be written: {error.strerror}", str(path), "check the permissions of its folder"
        ) from None
    return count


def rewritten(text: str, renamed: Sequence[Renaming]) -> tuple[str, int]:
    """The text with today's names, and how many words were replaced.

    Raises: RecipeError when the new text would not say the same: a word behind an alias, say.
    """
    starts = [0, *(one.end() for one in _LINE.finditer(text))]
    changes: dict[int, Renaming] = {}
    for one in dict.fromkeys(renamed):
        at = _offset(text, starts[one.place.line - 1] + one.place.column - 1, one.written)
        while at in changes and one.written in text[at + 1 :]:
            at = text.index(one.written, at + 1)
        changes[at] = one
    made = text
    for at, one in sorted(changes.items(), reverse=True):
        made = made[:at] + one.name + made[at + len(one.written) :]
    if _meant(made) != _meant(text) or _previous(made):
        lines = ", ".join(str(one.place) for one in renamed)
        raise RecipeError(
            "the previous names cannot be replaced automatically", lines, "replace them by hand"
        )
    return made, len(changes)


def _offset(text: str, start: int, written: str) -> int:
    """Place of the word of a key, a value or a reference that begins at `start`."""
    match = _BEFORE.match(text, start)
    at = start if match is None else match.end()
    return at if text.startswith(written, at) else max(text.find(written, start), start)


def _tree(text: str) -> tuple[Node | None, Faults]:
    faults = Faults()
    node = read_yaml(text, "", faults, fixed=Place(""))
    return (None if node is None else renewed(node, faults)), faults


def _meant(text: str) -> object:
    node, faults = _tree(text)
    return None if node is None or faults else plain(node)


def _previous(text: str) -> bool:
    return bool(_tree(text)[1].renamed)
