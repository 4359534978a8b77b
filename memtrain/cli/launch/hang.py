"""Whether the ranks of a run still move: reported when none does, and judged when they were asked to stop."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from memtrain.errors import LaunchError
from memtrain.trainers.run_folder.folder import RunFolder
from memtrain.trainers.run_folder.pulse import Pulse, pulse_file
from memtrain.trainers.run_folder.rank_failures import clear_faults, correct_status
from memtrain.trainers.runtime.exits import end_at_once
from memtrain.trainers.runtime.signals import asking

LOOK_S = 0.5
"""Seconds between two looks at the ranks. Taste."""

WARN_AFTER_S = 600.0
"""Silence of all ranks that is reported. Taste: more than a read of large weights from a slow disk takes."""


class HangWatch:
    """Follows the signs of life that ranks leave (run_folder/pulse.py)."""

    def __init__(
        self,
        folder: RunFolder,
        num_ranks: int,
        grace_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.grace_s = grace_s
        self.hung: LaunchError | None = None
        """The error to raise for ranks that were given up."""
        self._folder = folder
        self._num_ranks = num_ranks
        self._clock = clock
        self._seen: list[str] = []
        self._moved_at = clock()
        self._asked_at: float | None = None
        self._is_warned = False

    def is_hung(self, *, is_asked: bool) -> bool:
        """Look once; whether the ranks were asked to stop and no sign of life has come for the grace."""
        now, found = self._clock(), self._read()
        if found != self._seen:
            self._seen, self._moved_at, self._is_warned = found, now, False
        if is_asked and self._asked_at is None:
            self._asked_at = now
        silent_s = now - self._moved_at
        if silent_s > WARN_AFTER_S and not self._is_warned:
            self._is_warned = True
            print(
                f"no rank has made progress for {silent_s:.0f} s: {self._places()}",
                file=sys.stderr,
                flush=True,
            )
        if self._asked_at is None or now - max(self._moved_at, self._asked_at) <= self.grace_s:
            return False
        if self.hung is None:
            self.hung = LaunchError(
                f"the run was asked to stop and made no progress for {self.grace_s:.0f} s: "
                f"it was killed. {self._places()}",
                where=str(self._folder.path),
                fix="run the same command again: it resumes from the last checkpoint; "
                "cluster.stop_grace_s sets the waiting time",
            )
            correct_status(self._folder, self.hung)
        return True

    def _read(self) -> list[str]:
        """Pulse of each rank: a number that grows, and the place of the rank."""
        found: list[str] = []
        for rank in range(self._num_ranks):
            try:
                found.append(pulse_file(self._folder, rank).read_text().strip())
            except OSError:
                found.append("")
        return found

    def _places(self) -> str:
        """Last known place of each rank."""
        places = [message.partition(" ")[2] or "its imports" for message in self._seen]
        return "; ".join(f"rank {rank} is in {place}" for rank, place in enumerate(places))


@contextmanager
def watching_itself(folder: RunFolder, grace_s: float) -> Iterator[None]:
    """A run of this process alone, which a thread of it watches: asked to stop, it ends within the grace.

    A signal's handler waits for the main thread, which may hang in a call; the number of the signal does not,
    and is read from a pipe.
    """
    heard, hears = os.pipe()
    os.set_blocking(heard, False)
    os.set_blocking(hears, False)
    before = signal.set_wakeup_fd(hears, warn_on_full_buffer=False)
    pulse, over = Pulse(folder, 0), threading.Event()
    watch = HangWatch(folder, 1, grace_s)
    watcher = threading.Thread(target=_watch, args=(watch, heard, over), name="watch", daemon=True)
    pulse.start()
    watcher.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        over.set()
        watcher.join()
        pulse.stop()
        clear_faults(folder)
        os.close(heard)
        os.close(hears)


def _watch(watch: HangWatch, heard: int, over: threading.Event) -> None:
    """End this process when it was asked to stop and its main thread does not move."""
    is_asked = False
    while not over.wait(LOOK_S):
        with suppress(BlockingIOError):
            is_asked = is_asked or bool(set(os.read(heard, 512)) & set(asking()))
        if watch.is_hung(is_asked=is_asked):
            assert watch.hung is not None, "A hang has its error."
            print(watch.hung.text(), file=sys.stderr, flush=True)
            end_at_once(watch.hung.exit_code)
