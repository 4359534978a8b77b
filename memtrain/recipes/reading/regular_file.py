"""Opening what is a file: a pipe, a socket or a device would wait for a writer, or never end."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}


def open_regular(path: str | Path) -> BinaryIO:
    """The bytes of a regular file, or of what a link to one leads to; nothing that is none is waited for.

    Raises: OSError; one whose `strerror` says so where it is a pipe, a socket, a device or a folder.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            raise not_regular(path, mode)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def check_regular(path: str | Path) -> None:
    """Refuse a path that other code is going to open, and that is there and no file.

    Raises: OSError as `open_regular`; none where there is nothing.
    """
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISREG(mode):
        raise not_regular(path, mode)


def not_regular(path: str | Path, mode: int) -> OSError:
    """The error of a path whose `st_mode` is no regular file's."""
    number = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
    return OSError(number, f"it is {KINDS.get(stat.S_IFMT(mode), 'no file')}, not a file", str(path))


def read_regular(path: str | Path, encoding: str = "utf-8", errors: str = "strict") -> str:
    """The text of a regular file.

    Raises: OSError as `open_regular`; UnicodeDecodeError.
    """
    with open_regular(path) as file:
        return file.read().decode(encoding, errors)
