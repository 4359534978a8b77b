"""Signs of life between a launcher and its ranks: whether a rank moves, and whether its launcher is there.

A thread of each rank looks once a second at where the main thread is, and leaves word when it has moved. One
that waits for another rank, or for a disk, stays where it is: silence of all ranks is a hang, and the last
words say in which line each of them is. No torch.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from memtrain.trainers.run_folder.folder import RunFolder
from memtrain.trainers.run_folder.lock import OWNER, Owner

WATCHED = "MEMTRAIN_WATCHED"
"""Set for processes whose signs of life somebody follows."""

EVERY_S = 1.0
"""Seconds between two looks. Taste: far below any time that a person waits."""

IDLE = 0.05
"""Share of one core below which a process does nothing but wait. Taste: far from both ends."""

OWN = "memtrain"
"""Package whose lines are named; deeper lines are of other packages."""


@dataclass(frozen=True, slots=True)
class Family:
    """The processes that this rank was started by."""

    launcher: Owner | None
    """The launcher that holds the run folder; None where started by hand, or by SLURM."""
    parent: int

    @staticmethod
    def of_this_process(environment: Mapping[str, str]) -> Family:
        """Family of this process now."""
        owner = environment.get(OWNER)
        return Family(Owner.model_validate_json(owner) if owner else None, os.getppid())

    def is_gone(self) -> bool:
        """Whether the launcher, or its agent, has ended before this rank.

        Only ranks that a launcher of ours started are asked: another one may end on purpose, as a shell does.
        """
        if self.launcher is None:
            return False
        return os.getppid() != self.parent or not self.launcher.is_running()


class Pulse(threading.Thread):
    """Leaves word in the run folder while this process computes, or its main thread moves."""

    def __init__(self, folder: RunFolder, rank: int) -> None:
        super().__init__(name="pulse", daemon=True)
        self._path = pulse_file(folder, rank)
        self._main = threading.main_thread().ident
        self._ended = threading.Event()

    def run(self) -> None:
        """Look again and again, until `stop`."""
        count, before, computed_s, at_s = 0, None, time.process_time(), time.monotonic()
        while not self._ended.wait(EVERY_S):
            (found, words), cpu_s, now_s = _place_of(self._main or 0), time.process_time(), time.monotonic()
            if found == before and cpu_s - computed_s < IDLE * (now_s - at_s):
                continue
            before, computed_s, at_s, count = found, cpu_s, now_s, count + 1
            # A disk that refuses is met, and reported, by what the rank itself writes.
            with suppress(OSError):
                self._path.parent.mkdir(exist_ok=True)
                self._path.write_text(f"{count} {words}\n")

    def stop(self) -> None:
        """Leave no more word, and none behind."""
        self._ended.set()
        if self.is_alive():
            self.join()
        with suppress(OSError):
            self._path.unlink(missing_ok=True)


def pulse_file(folder: RunFolder, rank: int) -> Path:
    """File in which a rank leaves word."""
    return folder.faults / f"pulse-{rank}"


def _place_of(thread: int) -> tuple[tuple[tuple[int, int], ...], str]:
    """(instructions of a thread and its callers; the innermost line of our own).

    The line reads as `checkpoint.py:120 (finish)`. No frame is held when this returns: one that is held keeps
    all its tensors, also those of a function that has ended.
    """
    found: list[tuple[int, int]] = []
    words = ""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        found.append((id(frame), frame.f_lasti))
        if not words and OWN in Path(frame.f_code.co_filename).parts:
            words = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} ({frame.f_code.co_name})"
        frame = frame.f_back
    return tuple(found), words or "starting"
