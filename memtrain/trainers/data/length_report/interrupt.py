"""Ctrl-C that ends the reading of rows and nothing else; a second one ends the program."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(slots=True)
class Stop:
    """Whether the user has asked to stop."""

    asked: bool = False

    def until(self, rows: Iterator[T]) -> Iterator[T]:
        """The rows, up to where the user asks to stop."""
        for row in rows:
            if self.asked:
                return
            yield row


@contextmanager
def on_interrupt() -> Iterator[Stop]:
    """A stop that the first Ctrl-C asks for; outside the main thread, where no signal comes, nobody does."""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = signal.getsignal(signal.SIGINT)

    def ask(number: int, frame: object) -> None:
        stop.asked = True
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, ask)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)
