"""Ends of the process that others' code asks for: an unfinished run never ends as if it were done."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

end_at_once = os._exit
"""The system's own end of a process, for memtrain itself."""


class Left(SystemExit):
    """Someone called os._exit in a process that trains."""


@contextmanager
def no_way_out() -> Iterator[None]:
    """Inside, os._exit of this process raises `Left` in its caller; children that it forks end as ever."""
    pid = os.getpid()

    def refuse(status: int) -> NoReturn:
        if os.getpid() != pid:
            end_at_once(status)
        raise Left(status)

    before, os._exit = os._exit, refuse
    try:
        yield
    finally:
        os._exit = before


def words_of_exit(error: BaseException) -> str:
    """`sys.exit(0)`, `os._exit(0)` or `KeyboardInterrupt`: what was called."""
    if isinstance(error, Left):
        return f"os._exit({error.code!r})"
    return f"sys.exit({error.code!r})" if isinstance(error, SystemExit) else type(error).__name__
