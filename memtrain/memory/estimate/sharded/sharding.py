"""Sharding of weights over ranks: a rank's part of them, and the groups that are gathered together."""

from __future__ import annotations

from typing import NamedTuple

from memtrain.memory.estimate.quantized import packed_layer
from memtrain.memory.estimate.workload import DTYPE_BYTES
from memtrain.memory.model_shape.shape import ModelShape
from memtrain.memory.plan.engine_kinds import is_sharded
from memtrain.memory.plan.settings import Settings

GATHERED = 2
"""Copies of a group while it is gathered: the flat buffer that arrives, and the weights cut out of it."""


class Group(NamedTuple):
    """A group of weights that is gathered together; bytes of all ranks' parts."""

    weights: int = 0
    gradients: int = 0
    """Gradients as the backward pass makes them."""
    sent: int = 0
    """Laid end to end to be summed: in float32 for half-precision weights."""


class Groups(NamedTuple):
    """The groups of a model, as trainers/distributed/fsdp2.py makes them."""

    layer: Group
    """The largest decoder layer."""
    embedding: Group
    """Empty where it is the head, too."""
    head: Group
    """The head, a group of its own."""
    root: Group
    """An embedding that is the head, too: in the group of the backbone, which is whole in both passes."""


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


def groups(settings: Settings, shape: ModelShape) -> Groups:
    """The groups of a model that FSDP2 cuts."""
    size, adapter = DTYPE_BYTES[settings.dtype], settings.adapter

    def plain(count: int, *, is_trained: bool) -> Group:
        gradients = size * count if is_trained else 0
        return Group(size * count, gradients, 4 * count if is_trained else 0)

    is_mixture = shape.num_expert_layers > 0
    layer = plain(shape.num_per_layer(expert=is_mixture), is_trained=adapter is None)
    if settings.quantize != "none":
        layer = Group(packed_layer(shape, size, settings.quantize))
    if adapter is not None:
        added = 4 * shape.num_adapter_per_layer(adapter, expert=is_mixture)
        layer = Group(layer.weights + added, added, added)
    names = () if adapter is None else {name.rsplit(".", 1)[-1] for name in adapter.modules_to_save}
    embedding = plain(shape.num_embedding, is_trained=adapter is None or "embed_tokens" in names)
    head = plain(shape.num_head, is_trained=adapter is None or "lm_head" in names)
    none = Group()
    return Groups(layer, none, none, embedding) if shape.tied else Groups(layer, embedding, head, none)


def gathered(settings: Settings, shape: ModelShape) -> int:
    """Bytes of whole weights that a pass without gradients holds at most, beside a rank's own rows."""
    cut = groups(settings, shape)
    return cut.root.weights + GATHERED * max(cut.layer.weights, cut.embedding.weights, cut.head.weights)
