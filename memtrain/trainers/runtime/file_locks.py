"""Locks of open files, on file systems that have them; no torch."""

from __future__ import annotations

import errno
import fcntl

NOT_THERE = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
"""Answers of file systems without locks."""


def wait_for_lock(file: int) -> bool:
    """Hold the lock of an open file until it is closed; False where its file system has no locks.

    Raises: OSError when the disk refuses otherwise.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in NOT_THERE:
            raise
        return False
    return True
