"""Standard output and standard error, whatever becomes of who reads them; no torch.

A reader that leaves (`| head`), a full disk, a terminal that is closed or stopped: a training run goes on,
drops its words, and tells why in its log. Any other command ends at once, without a traceback.
"""

from __future__ import annotations

import fcntl
import io
import os
import select
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TextIO

OUT, ERR = 1, 2
NAMES = {OUT: "stdout", ERR: "stderr"}
OWN_FILES = 10
"""The outlets write to files numbered from here: a program that closes 1 or 2 closes nothing of ours, and the
next file that is opened, which gets that number, is not written into."""

STALLED_S = 10.0
"""Time that a run waits for a reader that does not read (a pager, a stopped terminal). Taste."""

_drops = False
_tell: Callable[[str], None] | None = None


class _Outlet(io.RawIOBase):
    """Writes to a file of this process until that fails."""

    def __init__(self, number: int, *, is_open: bool) -> None:
        self._number = number
        self._file = fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, OWN_FILES)
        self._is_stalled = False
        self.lost = "" if is_open else "it is closed"
        """Why nothing is written any more."""

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._number

    def isatty(self) -> bool:
        return os.isatty(self._file)

    def write(self, data: object) -> int:
        view = memoryview(data).cast("B")  # pyright: ignore[reportArgumentType]
        if self.lost:
            return len(view)
        try:
            if not self._is_ready():
                return len(view)
            # A pipe that is ready has room for so much: more would wait for the reader.
            return os.write(self._file, view[: select.PIPE_BUF] if _drops else view)
        except OSError as error:
            self.lost = error.strerror or str(error)
            _tell_lost()
            if _drops or self._number == ERR:
                return len(view)
            raise

    def _is_ready(self) -> bool:
        """Wait until something can be written; False where a run would wait too long."""
        with suppress(PermissionError):
            poll = select.poll()
            poll.register(self._file, select.POLLOUT)
            wait_s = 0.0 if self._is_stalled else STALLED_S
            self._is_stalled = not poll.poll(wait_s * 1000 if _drops else None)
            if self._is_stalled:
                _tell_lost()
        return not self._is_stalled

    @property
    def why_lost(self) -> str:
        """Why words were dropped; empty where none were."""
        return self.lost or ("nobody reads it" if self._is_stalled else "")


class _Text(io.TextIOWrapper):
    """Text on an outlet, which a program that closes it (a reward, say) only flushes."""

    def close(self) -> None:
        with suppress(OSError, ValueError):
            self.flush()


_outlets: dict[int, _Outlet] = {}


def take_streams() -> None:
    """Put streams that outlive their readers in the place of this process's. A number (0, 1, 2) that is
    closed leads to /dev/null: the next file that is opened would get it, and with it what is printed."""
    for number in (0, OUT, ERR):
        is_open = True
        try:
            os.fstat(number)
        except OSError:
            is_open = False
            found = os.open(os.devnull, os.O_RDWR)
            if found != number:
                os.dup2(found, number)
                os.close(found)
        if number:
            _outlets[number] = _Outlet(number, is_open=is_open)
    sys.stdin = sys.stdin or open(os.devnull)  # noqa: SIM115 (for the life of the process)
    sys.stdout, sys.stderr = _text(OUT, sys.stdout), _text(ERR, sys.stderr)


def _text(number: int, before: TextIO | None) -> TextIO:
    outlet = _outlets[number]
    return _Text(
        io.BufferedWriter(outlet),
        encoding=getattr(before, "encoding", None) or "utf-8",
        errors="backslashreplace",
        line_buffering=number == ERR or outlet.isatty(),
    )


def go_on_without_readers() -> None:
    """From now on words that cannot be written are dropped: this process trains."""
    global _drops
    _drops = True


def lost_words() -> str:
    """Which streams are lost, and why: `stdout (Broken pipe)`; empty where none is."""
    return " and ".join(f"{NAMES[n]} ({one.why_lost})" for n, one in _outlets.items() if one.why_lost)


def when_lost(tell: Callable[[str], None] | None) -> None:
    """Have `tell` called with `lost_words` when a stream is lost, or at once where one is; None: nobody."""
    global _tell
    _tell = tell
    if lost_words():
        _tell_lost()


def _tell_lost() -> None:
    if _tell is not None:
        _tell(lost_words())


def flush() -> None:
    """Write what is buffered. Raises: OSError where it cannot be, and this process does not train."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(ValueError, AttributeError):
            stream.flush()


def out_is_lost() -> bool:
    """Whether standard output cannot be written any more."""
    return OUT in _outlets and bool(_outlets[OUT].lost)
