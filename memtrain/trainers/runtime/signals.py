"""Stopping when asked: a signal sets a flag that the loop looks at between steps; no torch."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType

ASKED = (
    *(signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2),
    *(signal.SIGXCPU, signal.SIGALRM, signal.SIGVTALRM),
)
"""Signals that ask to save and stop. SIGUSR1 is how SLURM announces the end of a job's time, where asked to;
SIGUSR2 how SGE and LSF do; SIGXCPU comes at a limit of processor time, and each second after it; SIGALRM and
SIGVTALRM from timers. The system ends a process that does not listen to them."""

HUNG_UP = "the terminal was closed (SIGHUP): the run goes on without it; kill {pid} saves and stops it"

_hung_up: list[int] = []


@contextmanager
def outliving_terminal() -> Iterator[None]:
    """Inside, the end of the terminal (SIGHUP) is noted, and ends nothing. Under `nohup` it does not come."""
    before = signal.getsignal(signal.SIGHUP)
    if before is signal.SIG_IGN or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGHUP, lambda number, frame: _hung_up.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


def is_hung_up() -> bool:
    """Whether the terminal was closed meanwhile."""
    return bool(_hung_up)


def asking() -> tuple[signal.Signals, ...]:
    """The signals that ask to stop."""
    return ASKED


PR_SET_PDEATHSIG = 1

_early: list[int] = []
"""Signals that came before a StopRequest listened."""


def hold_signals() -> None:
    """Hold signals to stop until a StopRequest listens: a process that still loads would die of them.

    By handlers and not by a mask: a mask is of one thread, and the kernel gives the signal to another.
    """
    for one in asking():
        signal.signal(one, lambda number, frame: _early.append(number))
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda number, frame: _hung_up.append(number))


def end_with_parent() -> None:
    """Have the kernel end this process with the thread that started it, even one that is killed (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def let_signals_pass() -> None:
    """Ignore signals to stop from now on: a process on its way out would die of them, its work done.

    Python's own handlers are gone before the process is.
    """
    for one in asking():
        signal.signal(one, signal.SIG_IGN)


class StopRequest:
    """Whether this process was asked to stop. A context manager: the handlers before it come back.

    The first of them is remembered (`asking`). A second SIGINT kills at once, as if nothing had been
    caught; a second of the others changes nothing, because launchers send them to every process while the
    state is saved. Signals that `hold_signals` kept waiting are heard on entry.
    With several ranks, `Ranks.any(request.asked)` makes them stop at the same step.
    `is_alone`: whether who started this process has gone, which asks to stop as a signal does.
    """

    def __init__(self, is_alone: Callable[[], bool] | None = None) -> None:
        self.signal: signal.Signals | None = None
        """The signal that asked, or None."""
        self._is_alone = is_alone
        self._interrupts = 0
        self._before: dict[signal.Signals, signal._HANDLER] = {}

    @property
    def asked(self) -> bool:
        """Whether to save and exit."""
        return self.signal is not None or self.is_alone

    @property
    def is_alone(self) -> bool:
        """Whether who started this process has gone."""
        return self._is_alone is not None and self._is_alone()

    def __enter__(self) -> StopRequest:
        self._before = {one: signal.signal(one, self._on_signal) for one in asking()}
        while _early:
            self._on_signal(_early.pop(0), None)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for one, handler in self._before.items():
            signal.signal(one, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.signal = self.signal or signal.Signals(number)
        self._interrupts += number == signal.SIGINT
        if self._interrupts > 1:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
