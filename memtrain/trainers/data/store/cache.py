"""Folders that are made once and kept: by key, whole or not at all, by one process at a time."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from memtrain.errors import OR, DataError
from memtrain.trainers.runtime.atomic_files import sync_file, sync_folder
from memtrain.trainers.runtime.file_locks import wait_for_lock
from memtrain.trainers.runtime.own_trees import remove_half_written, remove_tree

KEY_LETTERS = 32


def cache_dir(given: str | None) -> Path:
    """Folder of tokenized rows: the recipe's, else `$MEMTRAIN_CACHE`, else ~/.cache/memtrain."""
    return Path(given or os.environ.get("MEMTRAIN_CACHE") or "~/.cache/memtrain").expanduser()


def key_of(values: dict[str, Any]) -> str:
    """Key of given values: equal where all of them are equal."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:KEY_LETTERS]


def kept(folder: Path, marker: str, make: Callable[[Path], None]) -> bool:
    """Have `folder` made by `make`, unless it is there; returns whether it was made now.

    `make` fills another folder, which is moved into place when it is whole and on the disk, so that a folder
    that holds `marker` (the file written last) is complete whatever happened. Processes that want the same
    wait.
    Raises: DataError when the disk is full or cannot be written.
    """
    if (folder / marker).is_file():
        return False
    try:
        locks = folder.parent / ".locks"
        locks.mkdir(parents=True, exist_ok=True)
        with locked(locks / folder.name) as is_alone:
            if (folder / marker).is_file():
                return False
            # Without locks what looks left may be of a process that lives.
            for leftover in folder.parent.glob(f".{folder.name}.part-*") if is_alone else ():
                remove_tree(leftover)
            if folder.is_symlink() or (folder.exists() and any(folder.iterdir())):
                raise DataError(
                    f"the folder of tokenized rows holds what memtrain did not write, or lost its {marker}",
                    str(folder),
                    f"move it away{OR}set data.cache_dir to another folder",
                )
            return _make(folder, marker, make)
    except OSError as error:
        raise DataError(
            f"cannot write tokenized rows: {error.strerror or error}",
            str(error.filename or folder),
            "free some space, or set data.cache_dir to another disk",
        ) from None


def _make(folder: Path, marker: str, make: Callable[[Path], None]) -> bool:
    """Make the folder beside its place and move it there; False where another process was earlier."""
    part = Path(tempfile.mkdtemp(prefix=f".{folder.name}.part-", dir=folder.parent))
    try:
        make(part)
        for path in part.iterdir():
            sync_folder(path) if path.is_dir() else sync_file(path)
        sync_folder(part)
        try:
            part.rename(folder)
        except OSError:
            if (folder / marker).is_file():
                return False
            raise
        sync_folder(folder.parent)
        return True
    finally:
        remove_half_written(part)


@contextmanager
def locked(path: Path) -> Iterator[bool]:
    """Hold a lock that no other process holds, until the process ends, however it ends.

    False where the file system has no locks: nobody is waited for then.
    """
    with path.open("w") as file:
        yield wait_for_lock(file.fileno())
