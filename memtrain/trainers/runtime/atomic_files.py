"""Writing to disk so that a file is whole or not there at all; no torch."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from memtrain.errors import LaunchError

GIB = 2**30

FIXES = {
    errno.ENOSPC: "free some space, or put run_dir on a larger disk",
    errno.EDQUOT: "free some of your quota, or put run_dir on another disk",
    errno.EROFS: "the file system is read-only; choose a writable run_dir",
    errno.EACCES: "choose a writable run_dir, or change the permissions of this one",
    errno.EPERM: "choose a writable run_dir, or change the permissions of this one",
    errno.ENOTDIR: "a file is where a folder is needed; move it away, or choose another run_dir",
    errno.EEXIST: "a file is where a folder is needed; move it away, or choose another run_dir",
    errno.EIO: "look at the disk (`dmesg`), or choose a run_dir on another one",
    errno.ESTALE: "the file server was restarted, or the file replaced there: run the same command again",
    errno.ETIMEDOUT: "the file server does not answer: run the same command again when it does",
    errno.ENOTCONN: "the file system is no longer mounted: mount it again",
    errno.ENODEV: "the file system is no longer mounted: mount it again",
    errno.ENXIO: "the file system is no longer mounted: mount it again",
    errno.EREMOTEIO: "look at the file server, or choose a run_dir on another disk",
    errno.EHOSTDOWN: "the file server does not answer: run the same command again when it does",
    errno.ENOLCK: "let the file server give locks (NFS: lockd), or choose a run_dir on another disk",
    errno.EMFILE: "raise the limit of open files (`ulimit -n`)",
    errno.ENFILE: "this machine has no open files left: end other programs",
    errno.EFBIG: "raise the limit of a file's size (`ulimit -f`), or choose another disk",
    errno.EBUSY: "another program uses it: end that, or choose another run_dir",
    errno.ENOENT: "something removed it while memtrain ran: run the same command again",
}
"""What the system answers where a disk refuses, and the way out."""


def sync_file(path: Path) -> None:
    """Hold until the contents of a file are on the disk itself."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


NO_SYNC = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF)
"""Answers of file systems (SMB, some of FUSE) that keep the names of a folder by themselves."""


def sync_folder(path: Path) -> None:
    """Hold until the names in a folder are on the disk itself; a rename is safe only after this."""
    try:
        sync_file(path)
    except OSError as error:
        if error.errno not in NO_SYNC:
            raise


def write_whole(path: Path, data: str | bytes) -> None:
    """Write a file so that a reader, or a kill at any moment, finds the old contents or the new.

    Raises: OSError when the disk refuses; the old contents then stand.
    """
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(unfinished, "wb") as file:
            # Half of a surrogate pair, which no encoding has, is spelled out.
            file.write(data.encode("utf-8", "backslashreplace") if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def share_one_mode(folder: Path) -> None:
    """Give every file of a folder the mode of a new file: safetensors' own are readable by their owner only,
    and a model that others may read would lack its weights. Where the mount gives all files one mode, none is
    changed: it would refuse."""
    probe = folder / ".mode"
    probe.touch()
    mode = probe.stat().st_mode & 0o777
    probe.unlink()
    for path in folder.rglob("*"):
        if path.is_file() and path.stat().st_mode & 0o777 != mode:
            path.chmod(mode)


@contextmanager
def system_errors() -> Iterator[None]:
    """Context in which safetensors' words about a disk that refuses become an OSError, as everybody else
    raises it."""
    try:
        yield
    except SafetensorError as error:
        found = re.search(r"\(os error (\d+)\)", str(error))
        if found is None:
            raise
        number = int(found.group(1))
        raise OSError(number, os.strerror(number)) from error


@contextmanager
def disk_faults(doing: str, path: Path) -> Iterator[None]:
    """Inside, a disk that refuses (an OSError of `FIXES`) becomes a LaunchError about the file it is of, or
    `path`."""
    try:
        yield
    except OSError as error:
        if error.errno not in FIXES or isinstance(error, ConnectionError):
            raise
        raise disk_fault(error, doing, Path(str(error.filename or path))) from error


def disk_fault(error: OSError, doing: str, path: Path) -> LaunchError:
    """The error a user reads when the disk refuses: the failed act, the place, the way out."""
    what = f"{doing}: {error.strerror or error}"
    if error.errno == errno.ENOSPC:
        free_bytes = shutil.disk_usage(nearest_folder(path)).free
        what += f" ({free_bytes / GIB:.2f} GiB free)"
    return LaunchError(
        what, where=str(path), fix=FIXES.get(error.errno or 0, "choose another run_dir, or repair this one")
    )


def nearest_folder(path: Path) -> Path:
    """`path` itself, or the nearest folder above it that exists."""
    return next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.is_dir())
