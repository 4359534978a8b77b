"""Saves of a run: their moments, their waiting, and their events."""

from __future__ import annotations

import time

from memtrain.memory.plan.plan import Plan
from memtrain.trainers.build.components import Built
from memtrain.trainers.checkpoints.async_save import Background
from memtrain.trainers.checkpoints.checkpoint import Parts, Save, save_checkpoint
from memtrain.trainers.checkpoints.manifest import facts_of
from memtrain.trainers.checkpoints.pinned_copy import HostCopies
from memtrain.trainers.checkpoints.snapshot import parts_of
from memtrain.trainers.loop.early_stopping import is_spent
from memtrain.trainers.online.rollout.online_loop import OnlineSteps
from memtrain.trainers.protocols.events import NoteEvent, SaveEvent
from memtrain.trainers.protocols.position import TrainState
from memtrain.trainers.run_folder.event_sinks import EventSinks
from memtrain.trainers.run_folder.folder import RunFolder
from memtrain.trainers.runtime.ranks import Ranks


class Saver:
    """Writes the checkpoints of a run: while its steps wait, or beside them (`save.async_save`).

    Every method is called by all ranks together, but for `is_at_work` and `close`.
    """

    def __init__(
        self,
        plan: Plan,
        folder: RunFolder,
        built: Built,
        ranks: Ranks,
        sinks: EventSinks,
        online: OnlineSteps | None,
    ) -> None:
        self._plan = plan
        self._folder = folder
        self._built = built
        self._ranks = ranks
        self._sinks = sinks
        self._kept = online.kept if online is not None else None
        self._background = Background(ranks)
        self._copies = HostCopies() if plan.settings.background_save else None
        self._step = 0
        self._began = 0.0
        self._held_s = 0.0
        """Time for which the steps waited for the save that is under way."""
        self._waited_s = 0.0
        self._left: list[str] = []
        self._noted: set[str] = set()

    @property
    def is_at_work(self) -> bool:
        """Whether this rank still writes."""
        return self._background.is_at_work

    def save(self, position: TrainState) -> None:
        """Save, or begin to save, after a save that is still under way.

        Raises: LaunchError, on every rank, when the disk refuses, or refused what was under way.
        """
        began = time.perf_counter()
        self.settle()
        waited_s = time.perf_counter() - began
        self._sinks.sync()
        recipe = self._plan.recipe
        is_early = is_spent(position, recipe) and position.step < self._plan.settings.max_steps
        facts = facts_of(self._plan, step=position.step, eval_loss=position.eval_loss, stopped_early=is_early)
        self._step, self._began = position.step, time.perf_counter()
        save = Save(
            self._folder, self._parts(position), facts, recipe.save.keep, recipe.keeps_best, self._left
        )
        if self._copies is None:
            save_checkpoint(save, self._ranks)
            self._held_s = time.perf_counter() - began
            self._emit(self._held_s)
        elif self._background.begin(save):
            self._waited_s, self._held_s = waited_s, time.perf_counter() - began

    def advance(self) -> None:
        """Advance a save under way by an agreement. All ranks are idle.

        Raises: LaunchError, on every rank, when the disk refused.
        """
        if not self._background.is_open:
            return
        began = time.perf_counter()
        is_done = self._background.advance()
        self._held_s += time.perf_counter() - began
        if is_done:
            self._emit(self._background.ended - self._began)

    def settle(self) -> None:
        """Wait until nothing is under way. Raises: as `advance`."""
        if not self._background.is_open:
            return
        began = time.perf_counter()
        self._background.settle()
        self._held_s += time.perf_counter() - began
        self._emit(self._background.ended - self._began)

    def close(self) -> None:
        """Let a process finish its writing, whatever has ended the run."""
        self._background.close()

    def _emit(self, seconds: float) -> None:
        """The checkpoint stands. What could not be removed is reported once."""
        for text in self._left:
            if text not in self._noted:
                self._noted.add(text)
                self._sinks.emit(NoteEvent(step=self._step, text=text))
        self._sinks.emit(
            SaveEvent(step=self._step, seconds=seconds, held_s=self._held_s, waited_s=self._waited_s)
        )

    def _parts(self, position: TrainState) -> Parts:
        built = self._built
        if self._copies is not None:
            self._copies.begin()
        return parts_of(
            built.scorer,
            built.optimizer,
            position,
            built.follower,
            self._kept,
            trained=built.trained,
            ranks=self._ranks,
            is_sharded=self._plan.settings.checkpoint_layout == "sharded",
            copies=self._copies,
        )
