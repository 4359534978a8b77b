"""Limits on a chat template, which is a program of a stranger: processor time, memory, and text.

Jinja's sandbox keeps a template from files, imports and attributes; nothing in it ends a loop, a recursion or
a string of gigabytes. Time is counted by a signal, so rendering in a thread that is not the main one has no
limit of time; memory is limited where the system can (Linux). No torch here.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import NoReturn, TypeVar

from memtrain.errors import DataError

Made = TypeVar("Made")

LIMIT_S = 10.0
"""Processor time of one conversation. Taste: ten thousand times what the slowest published template takes."""

LIMIT_BYTES = 2**30
"""Memory that one conversation may take beside the process's own."""

LIMIT_LETTERS = 2**26
"""Letters that one conversation may come to."""

STATM = "/proc/self/statm"
IS_LIMITED = os.path.exists(STATM)
"""Whether the system limits a process's memory and says how much it has."""


class _TooLong(BaseException):
    """Raised by the timer. No `Exception`: nothing between the timer and here may catch it."""


def within_limits(render: Callable[[], Made]) -> Made:
    """Result of `render` for a template, within the limits; its own exceptions pass.

    Raises: DataError when it takes too long or too much memory, or calls itself without end.
    """
    try:
        with _limit_of_time(), limit_of_memory(LIMIT_BYTES):
            return render()
    except _TooLong:
        raise _refused(f"takes more than {LIMIT_S:g} s for one conversation") from None
    except MemoryError:
        raise _refused(f"takes more than {LIMIT_BYTES // 2**30} GiB for one conversation") from None
    except RecursionError:
        raise _refused("recurses without end, or is nested too deeply") from None


def check_length(text: str) -> None:
    """Refuse a text that no conversation comes to.

    Raises: DataError.
    """
    if len(text) > LIMIT_LETTERS:
        raise _refused(f"renders {len(text):,} characters of one conversation")


def _refused(what: str) -> DataError:
    return DataError(
        f"the chat template {what}",
        "model.chat_template",
        "set model.chat_template to a template that you trust: a file, or a shipped one such as chatml",
    )


@contextlib.contextmanager
def _limit_of_time() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGPROF, _stop)
    try:
        # Again after as long: where the first falls into a finalizer, Python prints it and goes on.
        signal.setitimer(signal.ITIMER_PROF, LIMIT_S, LIMIT_S)
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    raise _TooLong


@functools.cache
def _statm(pid: int) -> int:
    """The file in which the system says how much memory this process has; kept open, a row is rendered in
    microseconds."""
    return os.open(STATM, os.O_RDONLY | os.O_CLOEXEC)


@contextlib.contextmanager
def limit_of_memory(most_bytes: int) -> Iterator[None]:
    """Inside, the process gets at most so many bytes beside those that it has: MemoryError beyond them."""
    if not IS_LIMITED:
        yield
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(os.pread(_statm(os.getpid()), 32, 0).split()[0])
    most = pages * resource.getpagesize() + most_bytes
    limits = [limit for limit in (soft, hard, most) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min(limits), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
