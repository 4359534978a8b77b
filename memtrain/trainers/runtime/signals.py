"""Stopping when asked: a signal sets a flag that the loop looks at between steps; no torch."""

from __future__ import annotations

import os
import signal
from types import FrameType, TracebackType

ASKED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""SIGUSR1 is how SLURM announces the end of a job's time, where it is asked to."""


_early: list[int] = []
"""Signals that came before a StopRequest listened."""


def hold_signals() -> None:
    """Let what asks to stop wait until a StopRequest listens: a process that still loads would die of it.

    By handlers and not by a mask: a mask is of one thread, and the kernel gives the signal to another.
    """
    for one in ASKED:
        signal.signal(one, lambda number, frame: _early.append(number))


def let_signals_pass() -> None:
    """From now on what asks to stop is not heard: a process on its way out would die of it, its work done.

    Python's own handlers are gone before the process is.
    """
    for one in ASKED:
        signal.signal(one, signal.SIG_IGN)


class StopRequest:
    """Whether this process was asked to stop. A context manager: the handlers before it come back.

    The first SIGTERM, SIGINT or SIGUSR1 is remembered. A second SIGINT kills at once, as if nothing had been
    caught; a second of the others changes nothing, because launchers send them to every process while the
    state is saved. Signals that `hold_signals` kept waiting are heard on entry.
    With several ranks, `Ranks.any(request.asked)` makes them stop at the same step.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        """The signal that asked, or None."""
        self._interrupts = 0
        self._before: dict[signal.Signals, signal._HANDLER] = {}

    @property
    def asked(self) -> bool:
        """Whether to save and exit."""
        return self.signal is not None

    def __enter__(self) -> StopRequest:
        self._before = {one: signal.signal(one, self._on_signal) for one in ASKED}
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
