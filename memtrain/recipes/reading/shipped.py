"""The recipes that come with memtrain, by name: `sft/qwen3-0.6b-lora`."""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path

import memtrain
from memtrain.errors import Fault, RecipeError

ENDINGS = (".yaml", ".yml")
COMMAND_LINE = "the command line"


def configs_dir() -> Path:
    """The folder of the shipped recipes: inside the installed package, or beside it in a checkout.

    Raises: RecipeError when there is neither.
    """
    package = Path(memtrain.__file__).resolve().parent
    for folder in (package / "configs", package.parent / "configs"):
        if folder.is_dir():
            return folder
    raise RecipeError("the shipped recipes are missing", str(package), "install memtrain again")


def shipped_names() -> tuple[str, ...]:
    """Every shipped recipe, as `memtrain` takes it: its path below configs/; 4b before 14b."""
    folder = configs_dir()
    names = [path.relative_to(folder).as_posix().removesuffix(".yaml") for path in folder.rglob("*.yaml")]
    return tuple(sorted(names, key=_by_number))


def _by_number(name: str) -> list[tuple[float, str]]:
    words = re.split(r"([0-9]+(?:\.[0-9]+)?)", name)
    return [(float(word), "") if word[:1].isdigit() else (-1.0, word) for word in words]


def header(path: Path) -> list[str]:
    """The comment lines at the top of a recipe, without their marks; the editor's schema line left out."""
    lines: list[str] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        if "yaml-language-server" not in line:
            lines.append(line[1:].strip())
    return lines


def find_recipe(path_or_name: str) -> Path:
    """The file of a recipe: a path, else the name of a shipped one.

    Raises: RecipeError with the nearest names.
    """
    path = Path(path_or_name).expanduser()
    names = shipped_names()
    if os.path.lexists(path) and (path.suffix in ENDINGS or path_or_name not in names):
        return path
    if path_or_name in names:
        return configs_dir() / f"{path_or_name}.yaml"
    if path.suffix in ENDINGS:
        raise RecipeError([Fault(f"there is no file {path_or_name}", COMMAND_LINE, _nearest_file(path))])
    what = f"'{path_or_name}' is neither a file nor a shipped recipe"
    raise RecipeError([Fault(what, COMMAND_LINE, _nearest_name(path_or_name))])


def _nearest_file(path: Path) -> str:
    stem = path.with_suffix("").as_posix()
    if stem.removeprefix("configs/") in shipped_names():
        return f"take the shipped recipe by its name: {stem.removeprefix('configs/')}"
    if path.parent.is_dir():
        beside = [one.name for one in path.parent.iterdir() if one.suffix in ENDINGS]
        near = difflib.get_close_matches(path.name, beside, n=3, cutoff=0.6)
        if near:
            return f"did you mean {' or '.join(str(path.parent / name) for name in near)}?"
    return "check the path; `memtrain recipes` lists shipped ones, `memtrain init sft -o my.yaml` writes one"


def _nearest_name(name: str) -> str:
    names = shipped_names()
    by_word = {shipped.split("/")[-1]: shipped for shipped in names} | {shipped: shipped for shipped in names}
    near = difflib.get_close_matches(name.lower(), by_word, n=3, cutoff=0.6)
    found = list(dict.fromkeys(by_word[word] for word in near))
    if found:
        return f"did you mean {' or '.join(found)}?"
    return "`memtrain recipes` lists the shipped recipes; your own files end in .yaml"
