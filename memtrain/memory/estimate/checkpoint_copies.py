"""Bytes that a save in the background copies into host memory: they stay, for the saves that follow."""

from __future__ import annotations

from memtrain.memory.estimate.auxiliary_models import headless
from memtrain.memory.estimate.static import copy_size, moments_bytes, reference_bytes, trained_parts
from memtrain.memory.model_shape.shape import ModelShape
from memtrain.memory.plan.engine_kinds import uses_zero, writes_shards
from memtrain.memory.plan.plan import COPY
from memtrain.memory.plan.settings import Settings


def copied_bytes(settings: Settings, shape: ModelShape) -> int:
    """Bytes of the copy of one process that writes: trained weights and their states, or its part of them."""
    if not settings.background_save:
        return 0
    parts = trained_parts(settings, shape)
    weights = sum(count * size for count, size in parts)
    halves = sum(count for count, size in parts if size < 4)
    masters = copy_size(settings) * halves
    copied = weights + masters + moments_bytes(settings, shape)
    if settings.value == "own":
        value = settings.model_copy(update={"value": "none"})
        copied += copied_bytes(value, headless(shape))
    share = settings.num_processes if writes_shards(settings) else 1
    return -(-copied // share) + _followed(settings, shape)


def copied_here(settings: Settings, shape: ModelShape) -> dict[str, int]:
    """The copy by owner where the device's memory is the host's; from the first save on."""
    return {COPY: copied_bytes(settings, shape)} if settings.device == "cpu" else {}


def copied_beside(settings: Settings, shape: ModelShape) -> int:
    """Bytes of the copies of all processes in the host's memory, where that is another than the device's."""
    if settings.device == "cpu":
        return 0
    return copied_bytes(settings, shape) * (settings.num_processes if writes_shards(settings) else 1)


def _followed(settings: Settings, shape: ModelShape) -> int:
    """A reference that follows the policy is saved too."""
    if settings.reference != "synced":
        return 0
    is_in_parts = settings.engine == "fsdp2" and settings.checkpoint_layout == "sharded"
    plain = settings if is_in_parts or uses_zero(settings) else settings.model_copy(update={"engine": "ddp"})
    return reference_bytes(plain, shape)
