"""Bytes of frozen weights in 4 and 8 bits: linear maps, and the stacks of experts beside them."""

from __future__ import annotations

from typing import NamedTuple

from memtrain.memory.model_shape.shape import MLP_NAMES, ModelShape
from memtrain.memory.plan.settings import Settings
from memtrain.memory.plan.sizes import NF4_BLOCK, SCALE_BLOCK, experts_at_once, packs_itself

NF4_BYTES = 0.5 + 1 / NF4_BLOCK + 4 / (NF4_BLOCK * SCALE_BLOCK)
"""Bytes of a 4-bit weight: half a byte, an 8-bit scale for 64, a float32 scale for 256 of those.
Source: Dettmers et al. 2023, arXiv:2305.14314, section 3."""

LAST = "down_proj"
"""Name of the last map of an MLP, and of its experts' stack."""


def expert_bytes(shape: ModelShape, quantize: str) -> int:
    """Bytes of all stacks of experts in 4 bits, or in 8 bits with a float32 scale for each row."""
    if quantize == "4bit":
        return round(NF4_BYTES * shape.num_expert_weights)
    rows = sum(count * stack.num_experts * stack.num_rows for stack, count in shape.stacks)
    return shape.num_expert_weights + 4 * rows


def linear_bytes(shape: ModelShape, quantize: str) -> int:
    """Bytes of the layers' linear maps in 4 or 8 bits."""
    linear = shape.num_linear_weights
    return round(NF4_BYTES * linear) if quantize == "4bit" else linear


def packed_layer(shape: ModelShape, size: int, quantize: str) -> int:
    """Bytes of the largest layer where its linear maps and experts are packed; `size`: bytes of the rest's
    weights."""
    every = shape.num_layer_parameters
    rest = size * (every - shape.num_linear_weights - shape.num_expert_weights)
    packed = linear_bytes(shape, quantize) + expert_bytes(shape, quantize)
    largest = shape.num_per_layer(expert=shape.num_expert_layers > 0)
    return round((rest + packed) * largest / every)


class Unpacked(NamedTuple):
    """Bytes of weights that are unpacked for a product."""

    most: int
    """While they are unpacked."""
    whole: int
    """Unpacked."""


def unpacked(shape: ModelShape, size: int, settings: Settings, *, last: bool = False) -> Unpacked:
    """The largest linear map, or the experts of a stack that are unpacked at once; with `last` those of the
    MLP's last map.

    `size`: bytes of an unpacked weight. Scales of experts in 4 bits are made in float32 from codes of four
    bytes; those of linear maps too, where they are packed by the same code. On a CPU 4-bit numbers are
    float32 before they are rounded, by codes of pairs of them in four bytes.
    """
    maps = [part for part in shape.linears if not last or part.name == LAST]
    if shape.num_expert_layers == shape.num_layers and shape.counts is None:
        maps = [part for part in maps if part.name not in MLP_NAMES]
    plain = max((part.num_inputs * part.num_outputs for part in maps), default=0)
    stacks = [stack for stack, _ in shape.stacks if not last or stack.name == LAST]
    sizes = [(stack.num_experts, stack.num_rows * stack.num_columns) for stack in stacks]
    experts = max((experts_at_once(count, each, size) * each for count, each in sizes), default=0)
    whole = size * max(plain, experts)
    if settings.quantize == "8bit":
        return Unpacked(whole, whole)
    if settings.device == "cuda":
        own = max(experts, plain if packs_itself(settings) else 0)
        return Unpacked(max(size * plain, round(own * (size + 8 / NF4_BLOCK))), whole)
    return Unpacked(round(max(plain, experts) * (4 / NF4_BLOCK + 4 + (2 if size == 4 else size))), whole)
