"""What rewards, environments and metrics change of the process that trains: put back, and told."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from memtrain.trainers.runtime.signals import asking

_told: set[str] = set()
_notes: list[str] = []


class Surroundings:
    """The state of this process that code may change behind the run's back."""

    def __init__(self) -> None:
        self._folder, self._path = os.open(".", os.O_RDONLY), os.getcwd()
        self._streams = sys.stdout, sys.stderr
        self._open = [number for number in (0, 1, 2) if _is_open(number)]
        self._handlers = {one: signal.getsignal(one) for one in (*asking(), signal.SIGHUP)}
        self._environment = dict(os.environ)
        self._mask = _umask()
        self._torch = sys.modules.get("torch")
        if self._torch is not None:
            self._dtype, self._threads = self._torch.get_default_dtype(), self._torch.get_num_threads()

    def put_back(self) -> None:
        """Put everything back as it was, and keep a note of what was not so."""
        with suppress(OSError):
            where = os.getcwd() if os.path.exists(".") else ""
            if where != self._path:
                os.fchdir(self._folder)
                _note("changed the current folder")
        if (sys.stdout, sys.stderr) != self._streams:
            sys.stdout, sys.stderr = self._streams
            _note("replaced sys.stdout or sys.stderr")
        for number in self._open:
            if not _is_open(number):
                found = os.open(os.devnull, os.O_RDWR)
                if found != number:
                    os.dup2(found, number)
                    os.close(found)
                _note("closed stdin, stdout or stderr")
        if _umask() != self._mask:
            os.umask(self._mask)
            _note("changed the mode of new files (umask)")
        if self._torch is not None:
            self._put_torch_back()
        if threading.current_thread() is threading.main_thread():
            for one, handler in self._handlers.items():
                if signal.getsignal(one) is not handler and handler is not None:
                    signal.signal(one, handler)
                    _note(f"took {one.name} over, by which a run is asked to stop")
        changed = sorted(
            name
            for name in self._environment.keys() | os.environ.keys()
            if self._environment.get(name) != os.environ.get(name)
        )
        if changed:
            self._environment = dict(os.environ)
            text = (
                f"a reward, environment or metric changed variables of the environment: {', '.join(changed)}"
            )
            _keep(f"{text}; they stay so")

    def _put_torch_back(self) -> None:
        assert self._torch is not None, "torch is loaded."
        if self._torch.get_default_dtype() != self._dtype:
            self._torch.set_default_dtype(self._dtype)
            _note("changed torch's default dtype")
        if self._torch.get_num_threads() != self._threads:
            self._torch.set_num_threads(self._threads)
            _note("changed torch's number of threads")


_kept: Surroundings | None = None


def keep_surroundings() -> None:
    """Take the state of now as the one that is put back after each call."""
    global _kept
    _kept = Surroundings()


@contextmanager
def surrounded() -> Iterator[None]:
    """Put back after the enclosed call what it has changed."""
    try:
        yield
    finally:
        if _kept is not None:
            _kept.put_back()


def tell_changes(tell: Callable[[str], None]) -> None:
    """Tell, once each, what was put back."""
    while _notes:
        tell(_notes.pop(0))


def _note(what: str) -> None:
    _keep(f"a reward, environment or metric {what}: it was put back")


def _keep(text: str) -> None:
    if text not in _told:
        _told.add(text)
        _notes.append(text)


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def _umask() -> int:
    """The mask of new files, read without changing it.

    Source: proc(5): `Umask` of /proc/PID/status; os.umask could only be asked by setting it.
    """
    with suppress(OSError), open("/proc/self/status") as file:
        return next((int(line.split()[1], 8) for line in file if line.startswith("Umask:")), 0)
    return 0
