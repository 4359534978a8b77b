"""The engines by name, and the tensors that each cuts into shards."""

from __future__ import annotations

from typing import Literal

from memtrain.memory.plan.settings import Settings

EngineName = Literal["ddp", "fsdp2", "zero1", "zero2", "zero3"]


Offload = Literal["none", "optimizer", "parameters"]


ZERO: tuple[EngineName, ...] = ("zero1", "zero2", "zero3")


def is_sharded(settings: Settings) -> bool:
    """Whether ranks hold shards of weights or states; every pass is then a collective."""
    return settings.num_processes > 1 and settings.engine != "ddp"


def uses_zero(settings: Settings) -> bool:
    """Whether DeepSpeed's engine exchanges gradients and steps."""
    return settings.num_processes > 1 and settings.engine in ZERO


def shards_weights(settings: Settings) -> bool:
    """Whether a rank holds only its part of the weights."""
    return settings.num_processes > 1 and settings.engine in ("fsdp2", "zero3")


def writes_shards(settings: Settings) -> bool:
    """Whether each process writes its own part; else the main process writes all."""
    return is_sharded(settings) and settings.checkpoint_layout == "sharded"
