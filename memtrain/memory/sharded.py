"""Bytes of a rank whose weights are in shards: its rows, the layers that are gathered, the sums on their way.

With n ranks a rank keeps 1/n of weights, gradients and optimizer states. Beside these a layer is whole while
it computes; in the backward pass the next one is gathered meanwhile, and the gradients of the one before are
on their way. Source: Zhao et al. 2023 (FSDP), arXiv:2304.11277, section 3.2; which buffers live together was
read in torch 2.13's `fully_shard`, and is held against measured peaks of two gloo ranks (tests/runs).
"""

from __future__ import annotations

from typing import NamedTuple

from memtrain.memory.activations import DTYPE_BYTES
from memtrain.memory.engines import is_sharded, shards_weights
from memtrain.memory.settings import Settings
from memtrain.memory.shape import ModelShape

GATHERED = 2
"""Copies of a group while it is gathered: the flat buffer that arrives, and the weights cut out of it."""


class Gathered(NamedTuple):
    """What is there beside a rank's own rows, at most, in a phase; bytes."""

    forward: int
    """In a pass without gradients, or in the forward pass."""
    backward: int
    """In the backward pass of a layer."""
    gradients: int
    """Whole gradients of a group, and the flat buffer in which they are summed over the ranks."""


def share(num_bytes: int, settings: Settings, *, of: str) -> int:
    """A rank's part of `num_bytes` of weights, gradients or states (`of`) under the plan's engine.

    Rows are dealt in equal parts, the last rank may have fewer: the first rank's part is told.
    """
    if not is_sharded(settings):
        return num_bytes
    shared = {
        "weights": ("fsdp2", "zero3"),
        "gradients": ("fsdp2", "zero2", "zero3"),
        "states": ("fsdp2", "zero1", "zero2", "zero3"),
    }[of]
    return -(-num_bytes // settings.num_processes) if settings.engine in shared else num_bytes


def gathered(settings: Settings, shape: ModelShape) -> Gathered:
    """What FSDP2 gathers and sums beside a rank's own rows; nothing where weights are whole."""
    if not shards_weights(settings):
        return Gathered(0, 0, 0)
    size = DTYPE_BYTES[settings.dtype]
    layer = size * shape.num_per_layer(expert=shape.num_expert_layers > 0)
    # A tied head keeps the embedding whole through both passes; else each is gathered when it is needed.
    stays = size * shape.num_embedding if shape.tied else 0
    outer = 0 if shape.tied else size * max(shape.num_embedding, shape.num_head)
    trained = _trained_of(settings, shape, max(layer, outer, stays))
    wide = 4 if size == 2 else size
    return Gathered(
        # A rank's own rows are laid end to end before they are sent: measured, see tests/runs/test_fsdp2.py.
        forward=stays + GATHERED * max(layer, outer) + -(-max(layer, outer) // settings.num_processes),
        backward=stays + layer + GATHERED * max(layer, outer),
        gradients=trained + trained * wide // size,
    )


def _trained_of(settings: Settings, shape: ModelShape, group: int) -> int:
    """Bytes of the gradients of a group of so many bytes."""
    if settings.adapter is None:
        return group
    return 4 * shape.num_adapter_per_layer(settings.adapter)
