"""Removing and replacing folders: only what memtrain wrote, and never through a link; no torch.

This is the one place of the package that removes a folder with what lies in it. A folder is known to be
ours by the list of its files, which is written with it (a manifest, `final.json`), or, half-written, by its
name.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path

HALF_WRITTEN = re.compile(
    "|".join(
        (
            r"\..+\.[0-9]+\.tmp",
            r"\.(final-tried|rehearsal)-.+",
            r"\.(tmp|gone|old)-step-[0-9]{6,}",
            r"\..+\.part-.+",
            r"\.lm_eval",
            r"memtrain-weights-[0-9]+-.+",
            r"memtrain-[0-9a-f]{12}",
        )
    )
)
"""Names of folders that only memtrain gives, and only to what is not finished, or is on its way out."""

FREE_NAMES = 10_000
"""Names that are tried for a folder that is set aside."""


class NotOurs(OSError):
    """A folder holds what memtrain did not write, or is a link: it is left as it is."""

    def __init__(self, why: str, path: Path) -> None:
        super().__init__(errno.EPERM, why, str(path))


def remove_tree(path: Path, known: Collection[str] | None = None) -> None:
    """Remove a folder whose files are all `known` (paths below it); None: one with the name of a half-written
    one.

    Raises: NotOurs, with nothing removed; OSError when the disk refuses.
    """
    if path.is_symlink():
        raise NotOurs("it is a link, and links are not followed", path)
    if known is None and HALF_WRITTEN.fullmatch(path.name) is None:
        raise NotOurs("memtrain did not write it", path)
    if foreign := foreign_in(path, known):
        raise NotOurs(f"it holds what memtrain did not write ({named(foreign)})", path)
    shutil.rmtree(path)


def remove_half_written(path: Path) -> None:
    """Remove a half-written folder, if it is there and the disk lets it: the next start tries again."""
    try:
        remove_tree(path)
    except OSError:
        return


def foreign_in(path: Path, known: Collection[str] | None = None) -> list[str]:
    """Links below a folder, and files that are not `known` (None: files may have any name)."""
    if path.is_symlink():
        return [path.name]
    return [name for name, is_link in _below(path) if is_link or (known is not None and name not in known)]


def _below(path: Path) -> Iterator[tuple[str, bool]]:
    """(path below the folder, whether it is a link) of everything that is no folder."""
    for folder, folders, files in os.walk(path):
        at = Path(folder)
        for name in (*files, *folders):
            is_link = (at / name).is_symlink()
            if is_link or name in files:
                yield (at / name).relative_to(path).as_posix(), is_link


def named(names: Collection[str], most: int = 3) -> str:
    """Some of the names: `a, b, c and 4 more`."""
    shown = sorted(names)[:most]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def put_in_place(made: Path, target: Path, *, is_ours: bool) -> Path | None:
    """Give the folder `made` the name `target`. What stood there is removed where it `is_ours`; anything
    else, a link too, is set aside whole, and its new name is returned.

    Raises: OSError when the disk refuses; what stood there then has its name.
    """
    aside = None
    if target.is_symlink() or (target.exists() and (not target.is_dir() or any(target.iterdir()))):
        aside = target.with_name(f".{target.name}-before.{os.getpid()}.tmp") if is_ours else _free(target)
        target.rename(aside)
    try:
        # A folder takes the place of an empty one.
        made.rename(target)
    except OSError:
        if aside is not None:
            aside.rename(target)
        raise
    if aside is None or not is_ours:
        return aside
    remove_half_written(aside)
    return None


def _free(target: Path) -> Path:
    """A name beside the folder that nothing has."""
    for number in range(1, FREE_NAMES):
        found = target.with_name(f"{target.name}-before-{number}")
        if not found.exists() and not found.is_symlink():
            return found
    raise NotOurs("no name is free to set it aside", target)
