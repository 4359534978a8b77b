"""Calls of foreign functions: several at once, each with a deadline, in order. No torch."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


class TookTooLong(Exception):
    """A call was not over at its deadline."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one call: its value, or what it raised (`TookTooLong` at its deadline)."""

    value: Any = None
    error: Exception | None = None


Call = Callable[[], Any]
"""A call with its arguments bound; what it returns may be awaitable."""


def call_all(calls: Sequence[Call], *, is_async: bool, timeout_s: float, at_once: int) -> list[Outcome]:
    """The outcome of every call, in their order; at most `at_once` run at a time.

    A plain function runs in a thread of its own, which is left behind when it takes too long: Python cannot
    end a thread. Such threads do not keep the process alive.
    """
    return asyncio.run(_all(calls, is_async=is_async, timeout_s=timeout_s, at_once=at_once))


async def _all(calls: Sequence[Call], *, is_async: bool, timeout_s: float, at_once: int) -> list[Outcome]:
    room = asyncio.Semaphore(at_once)

    async def one(call: Call) -> Outcome:
        async with room:
            waited = asyncio.ensure_future(call() if is_async else _in_thread(call))
            # Not wait_for: a TimeoutError of the function's own would look like ours.
            done, _ = await asyncio.wait({waited}, timeout=timeout_s)
            if not done:
                waited.cancel()
                return Outcome(error=TookTooLong(f"took longer than {timeout_s:g} s"))
            error = waited.exception()
            if error is not None and not isinstance(error, Exception):
                raise error
            return Outcome(error=error) if error is not None else Outcome(value=waited.result())

    return list(await asyncio.gather(*(one(call) for call in calls)))


def _in_thread(call: Call) -> asyncio.Future[Any]:
    """A future of a call in a daemon thread: an executor's threads would be waited for at exit."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(set_it: Callable[[Any], None], value: Any) -> None:
        if not future.done():
            set_it(value)

    def work() -> None:
        try:
            value, set_it = call(), future.set_result
        except Exception as error:
            value, set_it = error, future.set_exception
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, set_it, value)

    threading.Thread(target=work, daemon=True).start()
    return future
