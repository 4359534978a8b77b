"""The resume probe: a state saved after step 1 and restored into new parts makes the same step 2."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from memtrain.memory.plan.plan import Plan
from memtrain.trainers.build.components import build
from memtrain.trainers.checkpoints.checkpoint import Save, newest_complete, save_checkpoint
from memtrain.trainers.checkpoints.manifest import facts_of
from memtrain.trainers.checkpoints.snapshot import parts_of, restore
from memtrain.trainers.checkpoints.state_io import load_state
from memtrain.trainers.online.rollout.online_loop import OnlineSteps
from memtrain.trainers.protocols.position import TrainState
from memtrain.trainers.run_folder.folder import RunFolder
from memtrain.trainers.tools.verify.fixed_rollout import Rollouts
from memtrain.trainers.tools.verify.record import Recorded, Side


@dataclass(frozen=True, slots=True)
class Resumed:
    """Whether step 2 of the resumed run is step 2 of the run that was not stopped."""

    num_differing: int
    """Numbers (gradients and weights) whose bits differ."""
    where: str
    """The first tensor in which they do, or the loss."""
    num_compared: int

    @property
    def is_same(self) -> bool:
        """Whether all bits are."""
        return not self.where


def probe_resume(plan: Plan, rollouts: Rollouts) -> Resumed:
    """Make two steps of `plan`, as it is, and the second again from a checkpoint of the first.

    Dropout is as the recipe says: what is drawn must be drawn again. The checkpoint is written and found by
    what a run writes and finds its own with, in a folder that is removed.
    """
    with TemporaryDirectory(prefix="memtrain-verify-") as place:
        plan = plan.model_copy(update={"run_dir": place})
        through = Side(plan, build(plan), rollouts, is_plain=False)
        through.step(0, want_stats=True)
        _save(plan, through, Path(place))
        expected = through.step(1, want_stats=False)
        del through
        again = Side(plan, build(plan), rollouts, is_plain=False)
        _restore(again, Path(place))
        return compared(again.step(1, want_stats=False), expected)


def compared(found: Recorded, expected: Recorded) -> Resumed:
    """Bit for bit."""
    where = "" if found.loss == expected.loss else f"loss {found.loss!r}, not {expected.loss!r}"
    differing = compared_count = 0
    for kind in ("gradients", "weights"):
        mine: dict[str, Tensor] = getattr(found, kind)
        theirs: dict[str, Tensor] = getattr(expected, kind)
        for name in sorted(mine.keys() | theirs.keys()):
            one, other = mine.get(name), theirs.get(name)
            if one is None or other is None:
                where = where or f"{kind} of {name}, there once only"
                continue
            compared_count += one.numel()
            count = int((_bits(one) != _bits(other)).sum())
            differing += count
            if count:
                where = where or f"{kind} of {name}"
    return Resumed(differing, where, compared_count)


def _save(plan: Plan, side: Side, folder: Path) -> None:
    kept = side.source.kept if isinstance(side.source, OnlineSteps) else None
    parts = parts_of(
        side.built.scorer,
        side.built.optimizer,
        TrainState(step=1),
        side.built.follower,
        kept,
        trained=side.built.trained,
    )
    save_checkpoint(Save(RunFolder(folder), parts, facts_of(plan, step=1), keep=1))


def _restore(side: Side, folder: Path) -> None:
    found = newest_complete(RunFolder(folder)).checkpoint
    assert found is not None, "The checkpoint that was just written is complete."
    built, position = side.built, TrainState()
    restore(found, built.scorer, built.optimizer, position, built.follower, trained=built.trained)
    if isinstance(side.source, OnlineSteps):
        side.source.go_on(load_state(found.part("rollout")), position.step)


def _bits(tensor: Tensor) -> Tensor:
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(integers[tensor.itemsize])
