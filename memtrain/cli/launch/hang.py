"""Whether the ranks of a run still move: told when none does, and judged when they were asked to stop."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from memtrain.errors import LaunchError
from memtrain.trainers.loop.rank_failures import correct_status
from memtrain.trainers.run_folder.folder import RunFolder
from memtrain.trainers.run_folder.pulse import pulse_file

WARN_AFTER_S = 600.0
"""Silence of all ranks that is told. Taste: more than a read of large weights from a slow disk takes."""


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
                f"the ranks were asked to stop and made no progress for {self.grace_s:.0f} s: they were "
                "killed. "
                f"{self._places()}",
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
        places = [said.partition(" ")[2] or "its imports" for said in self._seen]
        return "; ".join(f"rank {rank} is in {place}" for rank, place in enumerate(places))
