"""A checkpoint that is written while the run goes on: one at most, agreed upon between two steps.

A thread of each rank writes that rank's parts and takes their checksums; when all are done, a thread of the
main rank gives the checkpoint its name. In between the ranks must agree, and they do so where they meet in
any case, at the end of a step: no collective is ever made by a thread. One process has nobody to agree with,
and its thread does all of it at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Thread

from memtrain.errors import Fault
from memtrain.trainers.checkpoints.checkpoint import Save, agree, attempted, together
from memtrain.trainers.checkpoints.manifest import FileEntry
from memtrain.trainers.runtime.ranks import Ranks


class Background:
    """The save under way, if any. Only this class reads the parts of a save.

    Whether one is under way (`is_open`) is the same on all ranks at every moment between two steps.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._save: Save | None = None
        self._is_named = False
        """All parts are written; the main rank gives the name."""
        self._entries: list[FileEntry] = []
        self._thread: Thread | None = None
        self._fault: tuple[Fault, ...] | None = None
        self._error: BaseException | None = None
        self.ended = 0.0
        """Time at which this rank's thread had done its part of the last save, by `time.perf_counter`."""

    @property
    def is_open(self) -> bool:
        """Whether a save was begun that the ranks have not agreed to be done."""
        return self._save is not None

    @property
    def is_at_work(self) -> bool:
        """Whether this rank's thread still writes."""
        return self._thread is not None and self._thread.is_alive()

    def begin(self, save: Save) -> bool:
        """Begin to write, called by all ranks; False where that checkpoint stands already.

        Raises: LaunchError, on every rank, when the disk refuses to begin.
        """
        assert self._save is None, "One save at a time."
        ranks = self._ranks
        if ranks.broadcast(ranks.is_main and save.stands()):
            return False
        together(ranks, save, save.prepare if ranks.is_main else None)
        self._save, self._is_named, self._entries = save, False, []
        self._start(self._write_all if ranks.world == 1 else self._write_own)
        return True

    def advance(self) -> bool:
        """Agree on the progress of all ranks, and go on; whether no save is under way any more.

        Called by all ranks together, when none of their threads is at work.

        Raises: LaunchError, on every rank, when the disk refused on any of them.
        """
        if self._save is None:
            return True
        self._join()
        gathered = self._ranks.gather((self._fault, self._entries))
        save = self._save
        if any(fault is not None for fault, _ in gathered):
            self._save = None
        agree(save, [fault for fault, _ in gathered], self._ranks)
        if self._is_named or self._ranks.world == 1:
            self._save = None
            return True
        self._is_named = True
        entries = [entry for _, share in gathered for entry in share]
        if self._ranks.is_main:
            self._start(lambda: save.finish(entries))
        return False

    def settle(self) -> None:
        """Wait until nothing is under way. Called by all ranks together. Raises: as `advance`."""
        while self._save is not None:
            self._join()
            self.advance()

    def close(self) -> None:
        """Let one process end its save, whatever has ended the run; several cannot agree any more."""
        if self._ranks.world == 1 and self._thread is not None:
            self._thread.join()

    def _start(self, act: Callable[[], None]) -> None:
        self._fault = self._error = None
        # A daemon: a rank that must end does not wait for a disk that hangs.
        self._thread = Thread(target=self._do, args=(act,), name="checkpoint", daemon=True)
        self._thread.start()

    def _do(self, act: Callable[[], None]) -> None:
        assert self._save is not None, "There is something to write."
        try:
            self._fault = attempted(self._save, act)
        except BaseException as error:
            self._error = error
        self.ended = time.perf_counter()

    def _write_own(self) -> None:
        assert self._save is not None, "There is something to write."
        self._save.write()
        self._entries = self._save.entries(self._save.own_files())

    def _write_all(self) -> None:
        self._write_own()
        assert self._save is not None, "There is something to write."
        self._save.finish(self._entries)

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            raise self._error
