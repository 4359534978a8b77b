"""Bytes of frozen weights in 4 and 8 bits: linear maps, and the stacks of experts beside them."""

from __future__ import annotations

from math import gcd

from memtrain.memory.model_shape.layer_parts import ExpertStack
from memtrain.memory.model_shape.shape import ModelShape

NF4_BLOCK = 64
"""Weights that share a scale. Source: bitsandbytes' default."""

SCALE_BLOCK = 256
"""Scales that share a scale of their own. Source: bitsandbytes."""

NF4_BYTES = 0.5 + 1 / NF4_BLOCK + 4 / (NF4_BLOCK * SCALE_BLOCK)
"""Bytes of a 4-bit weight: half a byte, an 8-bit scale for 64, a float32 scale for 256 of those.
Source: Dettmers et al. 2023, arXiv:2305.14314, section 3."""

UNPACKED_BYTES = 256 * 2**20
"""Most bytes of a stack of experts that are unpacked at once (one matrix may be more). Taste: a product with
a few experts' matrices is long enough to keep a GPU busy, and Qwen3-30B-A3B's gates need 768 MiB together."""


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


def experts_at_once(stack: ExpertStack, size: int) -> int:
    """Experts that are unpacked together: all that need at most `UNPACKED_BYTES`, in whole blocks of scales.

    `size`: bytes of an unpacked weight.
    """
    each = stack.num_rows * stack.num_columns
    least = NF4_BLOCK // gcd(each, NF4_BLOCK)
    return min(stack.num_experts, max(1, UNPACKED_BYTES // (each * size) // least) * least)


def unpacked_bytes(shape: ModelShape, size: int, quantize: str, device: str) -> int:
    """Bytes of what is unpacked at once for a product: a linear map, or some experts of a stack.

    `size`: bytes of an unpacked weight. Scales of experts in 4 bits are made in float32 from codes of four
    bytes. On a CPU linear maps are unpacked in the same way, and 4-bit numbers are float32 before they are
    rounded, by codes of pairs of them in four bytes.
    """
    experts = (experts_at_once(stack, size) * stack.num_rows * stack.num_columns for stack, _ in shape.stacks)
    most = max(experts, default=0)
    if quantize == "8bit":
        return size * max(shape.largest_linear, most)
    if device == "cuda":
        return max(size * shape.largest_linear, round(most * (size + 8 / NF4_BLOCK)))
    return round(max(shape.largest_linear, most) * (4 / NF4_BLOCK + 4 + (2 if size == 4 else size)))
