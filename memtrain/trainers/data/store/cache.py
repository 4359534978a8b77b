"""Folders that are made once and kept: by key, whole or not at all, by one process at a time."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from memtrain.errors import DataError

KEY_LETTERS = 32


def cache_dir(given: str | None) -> Path:
    """Folder of tokenized rows: the recipe's, else `$MEMTRAIN_CACHE`, else ~/.cache/memtrain."""
    return Path(given or os.environ.get("MEMTRAIN_CACHE") or "~/.cache/memtrain").expanduser()


def key_of(said: dict[str, Any]) -> str:
    """Key of what something is made of: equal where all of it is equal."""
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:KEY_LETTERS]


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
        with locked(locks / folder.name):
            if (folder / marker).is_file():
                return False
            for leftover in folder.parent.glob(f".{folder.name}.part-*"):
                shutil.rmtree(leftover)
            if folder.exists():
                shutil.rmtree(folder)
            _make(folder, make)
            return True
    except OSError as error:
        raise DataError(
            f"cannot write tokenized rows: {error.strerror or error}",
            str(error.filename or folder),
            "free some space, or set data.cache_dir to another disk",
        ) from None


def _make(folder: Path, make: Callable[[Path], None]) -> None:
    part = Path(tempfile.mkdtemp(prefix=f".{folder.name}.part-", dir=folder.parent))
    try:
        make(part)
        for path in part.iterdir():
            synced(path)
        synced(part)
        part.rename(folder)
        synced(folder.parent)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def synced(path: Path) -> None:
    """Wait until a file or a folder is on the disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock that no other process holds; it is let go when the process ends, however it ends."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
