"""bitsandbytes' optimizer states: bytes on the device, and on the host where they are paged.

Source: Dettmers et al. 2021, arXiv:2110.02861, section 2.1 (8-bit states in blocks of 256 with a float32
scale); what stays in float32 or is not paged: bitsandbytes 0.50.2, optim/optimizer.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from memtrain.memory.model_shape.shape import ModelShape
from memtrain.memory.plan.optimizers import OPTIMIZERS
from memtrain.memory.plan.settings import Settings
from memtrain.memory.plan.sizes import LEAST_8BIT, LEAST_PAGED, STATE_BLOCK


class StateBytes(NamedTuple):
    """Bytes of both moments of all trained tensors."""

    device: int
    host: int


def blockwise_states(settings: Settings, shape: ModelShape) -> StateBytes:
    """Place and size of the states of one of bitsandbytes' optimizers."""
    facts = OPTIMIZERS[settings.optimizer]
    is_8bit, is_paged = facts.is_8bit, facts.is_paged
    device = host = 0
    for size, count in trained_tensors(settings, shape):
        is_small = size < LEAST_8BIT
        numbers = 2 * size * (1 if is_8bit and not is_small else 4)
        scales = 2 * 4 * -(-size // STATE_BLOCK) if is_8bit and not is_small else 0
        is_away = is_paged and settings.device == "cuda" and size >= LEAST_PAGED
        host += count * numbers * is_away
        device += count * (scales + numbers * (not is_away))
    return StateBytes(device, host)


def trained_tensors(settings: Settings, shape: ModelShape) -> Iterator[tuple[int, int]]:
    """(numbers of a tensor, count of such tensors) of the trained weights."""
    adapter = settings.adapter
    if adapter is None:
        maps = [(part.num_inputs * part.num_outputs, shape.num_layers) for part in shape.linears]
        in_layers = shape.num_layers * (shape.num_norms_per_layer + shape.num_biases_per_layer)
        known = [(shape.width, 1 + in_layers // shape.width), (shape.num_embedding, 1), *maps]
        known += [(shape.num_head, 1)] if shape.num_head else []
        # Stacked experts, and whatever a family has besides: large.
        rest = shape.num_parameters - sum(size * count for size, count in known)
        yield from known
        if rest > 0:
            yield rest, 1
        return
    for part in shape.adapted(adapter):
        yield adapter.r * part.num_inputs, shape.num_layers
        yield adapter.r * part.num_outputs, shape.num_layers
        if adapter.kind == "dora":
            yield part.num_outputs, shape.num_layers
    saved = shape.num_saved_modules(adapter)
    if saved:
        yield saved, 1
