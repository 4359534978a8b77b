"""Configurations of a dataset's folder, which its README.md lists (`configs:`), as `load_dataset` reads them.

A folder that was downloaded is then the same rows as its id on the hub. Patterns are those of `datasets`, by
its own code. Nothing outside the folder is read: a card is a stranger's. No torch here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from glob import has_magic
from pathlib import Path
from typing import Any, cast

import yaml

from memtrain.errors import DataError
from memtrain.recipes.formats.fields import shown
from memtrain.recipes.reading.regular_file import open_regular
from memtrain.recipes.sections.data import Source

CARDS = ("README.md", ".huggingface.yaml")
"""Files that list configurations; what the second says counts."""
MOST_CARD_BYTES = 2**20
FRONT_MATTER = re.compile(r"\s*---[\r\n]+(.*?)[\r\n]+---(?:[\r\n]|$)", re.DOTALL)
READ = ("config_name", "data_files", "data_dir", "default", "version", "description")
"""Keys of a configuration that are read, or say nothing of the rows."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """A configuration of a dataset's folder."""

    name: str
    folder: Path
    """Folder that its patterns start at."""
    patterns: Mapping[str, tuple[str, ...]] | None
    """Patterns of files by split; None where the names of the files say their split."""
    is_default: bool


def configuration_of(folder: Path, source: Source) -> Configuration | None:
    """The configuration of a folder that a source names, or its default one; None where no card lists any.

    Raises: DataError where it has none of that name, or no default one, or the card cannot be read.
    """
    found = configurations_in(folder)
    names = ", ".join(found)
    if source.name is not None:
        if source.name in found:
            return found[source.name]
        if found:
            what = f"the folder '{folder}' has no configuration '{source.name}'"
            raise DataError(what, "data.name", f"use one that its card lists: {names}")
        what = f"name: {source.name} has no effect: no README.md of '{folder}' lists configurations"
        raise DataError(
            what, "data.name", "remove it, or give the path of a folder or of a file in it as source"
        )
    if not found:
        return None
    defaults = [one for one in found.values() if one.is_default or one.name == "default" or len(found) == 1]
    if len(defaults) == 1:
        return defaults[0]
    many = "several default ones" if defaults else "no default one"
    what = f"the folder '{folder}' has {len(found)} configurations and {many}"
    raise DataError(what, "data", f"choose one with name, beside source: {names}")


def configurations_in(folder: Path) -> dict[str, Configuration]:
    """The configurations of a folder by name, in the order of its card; empty where there is none.

    Raises: DataError where the card cannot be read, or reads a file in a way that is not supported.
    """
    listed: Any = None
    place = folder / CARDS[0]
    for name in CARDS:
        about = _about(folder / name)
        if about.get("configs"):
            listed, place = about["configs"], folder / name
    if listed is None:
        return {}
    if not isinstance(listed, list):
        raise _wrong(place, f"configs is {shown(listed)}, not a list")
    made = [_configuration(folder, place, one) for one in cast(list[Any], listed)]
    return {one.name: one for one in made}


def _about(path: Path) -> Mapping[str, Any]:
    """The YAML of a card; empty where it has none."""
    try:
        with open_regular(path) as file:
            text = file.read(MOST_CARD_BYTES).decode("utf-8", errors="replace").removeprefix("\ufeff")
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise _wrong(path, error.strerror or str(error)) from None
    if path.suffix == ".md":
        block = FRONT_MATTER.match(text)
        text = block[1] if block else ""
    if "configs" not in text:
        return {}
    try:
        about = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise _wrong(path, f"its YAML cannot be read: {reason}") from None
    return cast(Mapping[str, Any], about) if isinstance(about, Mapping) else {}


def _configuration(folder: Path, place: Path, given: Any) -> Configuration:
    """A configuration of a card.

    Raises: DataError where it is none.
    """
    if not isinstance(given, Mapping) or not isinstance(given.get("config_name"), str):
        raise _wrong(place, f"a configuration without config_name: {shown(cast(object, given))}")
    own = cast(Mapping[str, Any], given)
    name, data_dir = own["config_name"], own.get("data_dir")
    others = [key for key in own if key not in READ]
    if others:
        raise _wrong(
            place,
            f"the configuration '{name}' sets {', '.join(map(str, others))}, which memtrain does not read",
            "give the path of the files as source",
        )
    if data_dir is not None and (not isinstance(data_dir, str) or _leaves(data_dir)):
        raise _wrong(place, f"the data_dir of '{name}' is {shown(data_dir)}, not a folder in this one")
    files = own.get("data_files")
    patterns = None if files is None else _patterns(place, name, files)
    return Configuration(name, folder / (data_dir or ""), patterns, own.get("default") is True)


def _patterns(place: Path, name: str, files: Any) -> dict[str, tuple[str, ...]]:
    """Patterns by split: a text, a list of texts, or paths beside their splits.

    Raises: DataError.
    """
    if isinstance(files, Mapping):
        files = [{"split": split, "path": path} for split, path in cast(Mapping[str, Any], files).items()]
    items: list[Any] = cast(list[Any], files) if isinstance(files, list) else [files]
    made: dict[str, tuple[str, ...]] = {}
    for item in items:
        pair: Mapping[str, Any] = (
            cast(Mapping[str, Any], item) if isinstance(item, Mapping) else {"path": item}
        )
        split, paths = pair.get("split", "train"), pair.get("path")
        several: list[Any] = cast(list[Any], paths) if isinstance(paths, list) else [paths]
        if not isinstance(split, str) or not several or not all(isinstance(one, str) for one in several):
            raise _wrong(
                place, f"the data_files of '{name}' are {shown(files)}, not paths or splits with paths"
            )
        if outside := next((one for one in several if _leaves(one)), None):
            raise _wrong(place, f"'{name}' reads '{outside}', which is not in this folder")
        made[split] = (*made.get(split, ()), *several)
    return made


def _leaves(path: str) -> bool:
    """Whether a pattern is an address, or leads out of the folder that it starts at."""
    inside = os.path.normpath(path)
    return "://" in path or os.path.isabs(path) or inside == ".." or inside.startswith("../")


def _wrong(
    place: Path, what: str, fix: str = "correct the card, or give the path of the files as source"
) -> DataError:
    return DataError(f"the configurations of a dataset cannot be read: {what}", str(place), fix)


def files_of(found: Configuration, split: str) -> tuple[Path, ...]:
    """The files of a split of a configuration, as `load_dataset` finds them.

    Raises: DataError where it has no such split, or a file of it is missing.
    """
    assert found.patterns is not None, "the caller reads folders by the names of their files"
    if split not in found.patterns:
        raise DataError(
            f"the configuration '{found.name}' of '{found.folder}' has no split '{split}'",
            "data.split",
            f"use one of its splits: {', '.join(found.patterns)}",
        )
    paths = [path for pattern in found.patterns[split] for path in _matches(found, pattern)]
    if not paths:
        patterns: Sequence[str] = found.patterns[split]
        what = (
            f"no file of '{found.folder}' is in the split '{split}' of '{found.name}': {', '.join(patterns)}"
        )
        raise DataError(what, "data", "download the dataset again, with its files")
    return tuple(paths)


def _matches(found: Configuration, pattern: str) -> list[Path]:
    from datasets.data_files import resolve_pattern

    try:
        # Absolute, for fsspec's sake; given back as the user wrote the folder.
        base = found.folder.absolute()
        own = sorted(Path(path) for path in resolve_pattern(pattern, base.as_posix()))
        return [found.folder / os.path.relpath(path, base) for path in own]
    except FileNotFoundError:
        if has_magic(pattern):
            return []
        what = f"'{found.name}' names the file {pattern}, which is not there"
        raise _wrong(found.folder, what, "download the dataset again, with its files") from None
