"""Host memory through a run: while rows are laid out, in its steps, and while a checkpoint is written."""

from __future__ import annotations

from collections.abc import Mapping

from memtrain.memory.estimate.checkpoint_copies import copied_bytes
from memtrain.memory.estimate.static import largest_trained
from memtrain.memory.model_shape.shape import ModelShape
from memtrain.memory.plan.engine_kinds import is_sharded, writes_shards
from memtrain.memory.plan.plan import COPY
from memtrain.memory.plan.settings import Settings

Owners = Mapping[str, int]
"""Bytes by owner, of all processes of a run together."""

LAID_OUT_BYTES = 450
"""Bytes of a row while rows are laid out as sequences. Source: measured, 2,000,000 rows took some 700 MiB,
900 MiB where they are pairs (docs/inspect-lengths.md); each process lays out all of them."""

NUM_PIECES, PIECE_BYTES = 4, 64 * 2**20
"""Pieces of tensors that a process copies from the device and writes at once, as memtrain/trainers/runtime/
parallel_write.py does."""

LAID_OUT = "rows being laid out"
WRITTEN = "checkpoint being written"
STEPS = "steps"

PINNED = ("offloaded activations", "optimizer states", "weights", "shards")
"""Owners whose memory is locked, so that the bus copies from it while the device computes; all others' may be
swapped."""


def host_phases(settings: Settings, shape: ModelShape, in_steps: Owners, num_rows: int) -> dict[str, Owners]:
    """Bytes by owner in each phase; `in_steps`: those of the optimizer steps.

    A save copies a few pieces at a time, or gathers all that is saved where the main process writes for ranks
    that hold shards; one in the background has its copy among `in_steps`.
    """
    resting = {name: in_steps[name] for name in ("processes", "dataset index") if name in in_steps}
    rows = {LAID_OUT: LAID_OUT_BYTES * num_rows * settings.num_processes}
    written = {} if COPY in in_steps else {WRITTEN: written_bytes(settings, shape)}
    return {"data preparation": resting | rows, STEPS: in_steps, "saving": dict(in_steps) | written}


def written_bytes(settings: Settings, shape: ModelShape) -> int:
    """Bytes that a save holds on the host beside what is there, all writing processes together."""
    if settings.device == "cpu":
        return 0
    if is_sharded(settings) and not writes_shards(settings):
        return copied_bytes(settings.model_copy(update={"background_save": True}), shape)
    writers = settings.num_processes if writes_shards(settings) else 1
    return writers * NUM_PIECES * min(PIECE_BYTES, 4 * largest_trained(settings, shape))


def highest(phases: Mapping[str, Owners]) -> tuple[str, Owners]:
    """The phase that needs the most, and its owners; the steps where others need no more."""
    name = max(phases, key=lambda phase: (sum(phases[phase].values()), phase == STEPS))
    return name, phases[name]


def disk_bytes(settings: Settings, waiting: int) -> int:
    """Bytes of offloaded activations that go to files: of `waiting`, what the host is not to hold."""
    if settings.offload_disk is None or settings.offload_host_bytes is None:
        return 0
    return max(0, waiting - settings.offload_host_bytes)
