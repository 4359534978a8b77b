"""Stopping when asked: SIGTERM and SIGINT set a flag that the loop looks at between steps; no torch."""

from __future__ import annotations

import os
import signal
from types import FrameType, TracebackType

ASKED = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """Whether this process was asked to stop. A context manager: the handlers before it come back.

    The first SIGTERM or SIGINT is remembered. A second SIGINT kills at once, as if nothing had been caught;
    a second SIGTERM changes nothing, because launchers send it to every process while the state is saved.
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
