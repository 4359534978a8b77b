"""Calls of foreign functions: several at once, each with a deadline, begun now, waited for later."""

from __future__ import annotations

import asyncio
import os
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from memtrain.trainers.online.rewards.interpreter_watch import BEAT_S, beat, begun, over
from memtrain.trainers.online.rewards.surroundings import surrounded
from memtrain.trainers.runtime.exits import words_of_exit

OURS = Path(__file__).parents[3]
"""The package, whose lines are no place of a user's fault."""


class TookTooLong(Exception):
    """A call was not over at its deadline."""


class Exited(Exception):
    """A call tried to end the process: by `sys.exit`, `os._exit`, KeyboardInterrupt, or an error that is no
    Exception."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(f"tried to end the process: {words_of_exit(error)}")
        self.__traceback__ = error.__traceback__


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a call: its value, or its exception (`TookTooLong` at its deadline)."""

    value: Any = None
    error: Exception | None = None


Call = Callable[[], Any]
"""A call with its arguments bound; its result may be awaitable."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Begins the calls of one function; at most `at_once` of them run at a time.

    A plain function runs in a thread of its own, which is left behind when it takes too long: Python cannot
    end a thread. Such threads do not keep the process alive.
    """

    is_async: bool
    timeout_s: float
    """Of each call, from its own beginning."""
    at_once: int
    room: asyncio.Semaphore = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "room", asyncio.Semaphore(self.at_once))

    def begin(self, call: Call) -> Future[Outcome]:
        """Begin a call as soon as there is room; returns at once."""
        return asyncio.run_coroutine_threadsafe(self._one(call), _loop(os.getpid()))

    async def _one(self, call: Call) -> Outcome:
        async with self.room:
            # Before the call: it may never let this thread speak again.
            begun()
            beat(self.timeout_s)
            try:
                waited = asyncio.ensure_future(_awaited(call) if self.is_async else _in_thread(call))
                is_done = await self._within(waited)
            finally:
                over()
            if not is_done:
                waited.cancel()
                return Outcome(error=TookTooLong(f"took longer than {self.timeout_s:g} s"))
            error = asyncio.CancelledError() if waited.cancelled() else waited.exception()
            if error is not None and not isinstance(error, Exception):
                error = Exited(error)
            return Outcome(error=error) if error is not None else Outcome(value=waited.result())

    async def _within(self, waited: asyncio.Future[Any]) -> bool:
        """Wait until the call is done; False at its deadline."""
        until = time.monotonic() + self.timeout_s
        while True:
            beat(self.timeout_s)
            # Not wait_for: a TimeoutError of the function's own would look like ours.
            left_s = min(BEAT_S, until - time.monotonic())
            if (await asyncio.wait({waited}, timeout=max(0.0, left_s)))[0]:
                return True
            if time.monotonic() >= until:
                return False


def call_all(calls: Sequence[Call], *, is_async: bool, timeout_s: float, at_once: int) -> list[Outcome]:
    """The outcome of every call, in their order; at most `at_once` run at a time."""
    caller = Caller(is_async, timeout_s, at_once)
    begun = [caller.begin(call) for call in calls]
    return [one.result() for one in begun]


@cache
def _loop(process: int) -> asyncio.AbstractEventLoop:
    """The event loop of this process's calls, in a thread of its own for the whole run.

    One for all calls: a client that an async function keeps between calls belongs to a loop. By process: a
    fork has no threads of its parent's.
    """
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True, name="rewards").start()
    return loop


async def _awaited(call: Call) -> Any:
    """Result of an async call. One that exits would end the event loop, and later calls never begin."""
    try:
        with surrounded():
            return await call()
    except Exception:
        raise
    except BaseException as error:
        raise Exited(error) from error


def _in_thread(call: Call) -> asyncio.Future[Any]:
    """A future of a call in a daemon thread: an executor's threads would be waited for at exit."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(set_it: Callable[[Any], None], value: Any) -> None:
        if not future.done():
            set_it(value)

    def work() -> None:
        try:
            with surrounded():
                value, set_it = call(), future.set_result
        except Exception as error:
            value, set_it = error, future.set_exception
        except BaseException as error:
            value, set_it = Exited(error), future.set_exception
        loop.call_soon_threadsafe(settle, set_it, value)

    threading.Thread(target=work, daemon=True).start()
    return future


def line_of(error: BaseException) -> str:
    """`file:line` of the last line of the user's own code that an error went through; empty where none is."""
    own = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not Path(frame.filename).is_relative_to(OURS)
    ]
    return f"{own[-1].filename}:{own[-1].lineno}" if own else ""
