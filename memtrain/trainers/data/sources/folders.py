"""A folder to its data files, and to every other file in it: unread files are named, never passed over.

No torch here.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from memtrain.errors import DataError
from memtrain.recipes.sections.data import Source
from memtrain.trainers.data.sources.dataset_card import Configuration, files_of
from memtrain.trainers.data.sources.readers import READABLE, READERS, TEXT, ending

SPLIT_WORDS = {"train": "train", "test": "test", "validation": "validation", "valid": "validation"}
SPLIT_WORDS |= {"dev": "validation", "val": "validation", "eval": "validation"}
"""Words in the names of a folder's files that say which split they are."""
NOT_DATA = ("dataset_info.json", "state.json", "dataset_dict.json", "dataset_infos.json")
"""Files beside the data in folders that `datasets` writes."""
ABOUT = re.compile(r"(README|LICENSE|LICENCE|NOTICE|COPYING)([._-].*)?", re.IGNORECASE)
"""Names of text files that speak of the data."""
HOLD_OUT = (
    "remove it; to hold out a part of the training rows, set data.eval_fraction: 0.1 in place of data.eval"
)
"""The way out of a split that files do not have."""
NUM_NAMED = 10
"""Files of a reason that are named singly."""


@dataclass(frozen=True, slots=True)
class Unread:
    """A file that lies among the data and is not read."""

    path: Path
    num_bytes: int
    why: str


def files_in(folder: Path, split: str) -> tuple[tuple[Path, ...], tuple[Unread, ...]]:
    """(data files of a folder and its subfolders, sorted, of one split where names give the split;
    every other file there).

    Raises: DataError when a folder cannot be listed, or holds no data, none of that split, or several kinds.
    """
    unread: list[Unread] = []
    found: list[Path] = []
    for path in sorted(every_file(folder)):
        why = why_no_data(folder, path)
        if why:
            unread.append(Unread(path, size_of(path), why))
        else:
            found.append(path)
    if not found:
        raise DataError(
            f"no readable file in the folder '{folder}'",
            str(folder),
            f"give files of a kind that is read: {READABLE}",
        )
    splits = [split_of(path.relative_to(folder)) for path in found]
    if any(splits):
        wanted = SPLIT_WORDS.get(split, split)
        others = [(path, own) for path, own in zip(found, splits, strict=True) if own != wanted]
        found = [path for path, own in zip(found, splits, strict=True) if own == wanted]
        if not found:
            known = ", ".join(sorted({own for own in splits if own}))
            raise DataError(
                f"the folder '{folder}' has no split '{split}'",
                "data.split",
                f"use one of its splits: {known}",
            )
        for path, own in others:
            why = f"of the split {own}" if own else "of no split while other names say theirs"
            unread.append(Unread(path, size_of(path), why))
    elif split != "train":
        raise DataError(
            f"split: {split} has no effect on the folder '{folder}': the names of its files say no split",
            "data.split",
            HOLD_OUT,
        )
    kinds = sorted({ending(path) for path in found})
    if len(kinds) > 1:
        raise DataError(
            f"the folder '{folder}' contains files of several kinds: {', '.join(kinds)}",
            str(folder),
            f"choose with a glob: '{folder}/*{kinds[0]}'",
        )
    return tuple(found), tuple(unread)


def files_of_configuration(
    folder: Path, chosen: Configuration, split: str
) -> tuple[tuple[Path, ...], tuple[Unread, ...]]:
    """(data files of a split of a configuration; every other file of the folder).

    Raises: DataError as `files_in`, and where the configuration has no such split or lacks a file.
    """
    if chosen.patterns is None:
        found, _ = files_in(chosen.folder, split)
    else:
        found = files_of(chosen, split)
    read = set(found)
    others = [path for path in sorted(every_file(folder)) if path not in read]
    why = f"not of the split {split} of the configuration {chosen.name}"
    unread = tuple(Unread(one, size_of(one), why_no_data(folder, one) or why) for one in others)
    bad = next((one for one in found if why_no_data(folder, one)), None)
    if bad is not None:
        raise DataError(
            f"'{bad}' is {why_no_data(folder, bad)}: the configuration '{chosen.name}' lists it as data",
            str(bad),
            f"give files of a kind that is read: {READABLE}",
        )
    return found, unread


def refuse_split(source: Source, files: Sequence[Path]) -> None:
    """Refuse a split of files that are none: its rows would be all rows, those that are trained on too.

    Raises: DataError.
    """
    wanted = SPLIT_WORDS.get(source.split, source.split)
    others = [path for path in files if split_of(Path(path.name)) != wanted]
    if source.split == "train" or not others:
        return
    what = f"split: {source.split} has no effect on '{source.source}': "
    what += "the name of the file says no such split" if len(files) == 1 else "its files say no such split"
    raise DataError(
        what,
        "data.split",
        HOLD_OUT,
    )


def every_file(folder: Path) -> Iterator[Path]:
    """Every file below a folder; links to folders are followed, each folder is entered once.

    Raises: DataError when one cannot be listed.
    """

    def fail(error: OSError) -> None:
        what = f"cannot list the folder '{error.filename}': {error.strerror}"
        raise DataError(what, str(error.filename), "make it readable, or name the files with a glob")

    entered: set[tuple[int, int]] = set()
    for at, folders, files in os.walk(folder, followlinks=True, onerror=fail):
        own = os.stat(at)
        if (own.st_dev, own.st_ino) in entered:
            folders.clear()
            continue
        entered.add((own.st_dev, own.st_ino))
        folders.sort()
        yield from (Path(at) / name for name in files)


def why_no_data(folder: Path, path: Path) -> str:
    """Reason that a file of a folder holds no rows to read; empty for data. A broken link to data is data."""
    if any(part.startswith(".") for part in path.relative_to(folder).parts):
        return "hidden"
    if path.name in NOT_DATA:
        return "metadata of a dataset"
    if ending(path) not in READERS:
        return "not a readable kind of file"
    if ending(path) == TEXT and ABOUT.fullmatch(path.stem):
        return "a text about the data"
    if path.exists() and not path.is_file():
        return "a pipe or a device"
    return ""


def split_of(path: Path) -> str | None:
    """The split that a path inside a folder names: `train/0.jsonl`, `validation-00000.parquet`."""
    for part in path.parts:
        word = re.split(r"[^a-z]", part.lower(), maxsplit=1)[0]
        if word in SPLIT_WORDS:
            return SPLIT_WORDS[word]
    return None


def size_of(path: Path) -> int:
    """Bytes of a file; 0 for a link to nothing."""
    return path.stat().st_size if path.exists() else 0


def unread_notes(place: str, unread: Sequence[Unread]) -> Iterator[str]:
    """A sentence for each reason why files below `place` are not read: their names and bytes."""
    by_why: dict[str, list[Unread]] = defaultdict(list)
    for one in unread:
        by_why[one.why].append(one)
    for why, files in by_why.items():
        named = sorted(files, key=lambda one: -one.num_bytes)[:NUM_NAMED]
        parts = [f"{os.path.relpath(one.path, place)} ({bytes_words(one.num_bytes)})" for one in named]
        if rest := files[NUM_NAMED:]:
            total = sum(one.num_bytes for one in files) - sum(one.num_bytes for one in named)
            parts.append(f"{len(rest):,} more ({bytes_words(total)})")
        yield f"not read in {place}, {why}: {', '.join(parts)}"


def bytes_words(num_bytes: int) -> str:
    """`512 B`, `1.5 KiB`, `3.2 GiB`."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:,.0f} {unit}" if unit == "B" else f"{size:,.1f} {unit}"
        size /= 1024
    return f"{size:,.1f} GiB"


def folders_among(paths: Iterable[Path]) -> tuple[Unread, ...]:
    """Matches of a glob that are no files: nothing in them is read."""
    return tuple(
        Unread(path, 0, "a folder, a pipe or a device")
        for path in paths
        if path.exists() and not path.is_file()
    )
