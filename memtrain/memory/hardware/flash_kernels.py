"""Scratch of flash attention's backward kernels: memory on a GPU that no program sees as a tensor.

Every number here is read from the kernels' public source, and none is measured on a GPU. Both libraries pad
each segment (a row, a document, a prompt) to a block of rows, so many short segments cost more than one long
one. Their forward passes pad nothing: the log-sum-exp of rows of variable length is [heads, tokens].

Source: flash-attn 2.8.3, csrc/flash_attn/flash_api.cpp, mha_varlen_bwd (dq_accum, softmax_d, dk_expanded,
dv_expanded), the same in torch 2.13's aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp; and
hopper/flash_api.cpp, mha_bwd (dq_accum, softmax_d, softmax_lse_log2, dk_accum, dv_accum, dq_semaphore).
"""

from __future__ import annotations

from typing import NamedTuple

HOPPER_WIDTHS = (64, 96, 128, 192, 256)
"""Head widths that FlashAttention-3 computes in; others are widened to the next.

Source: flash-attention, hopper/flash_api.cpp, round_up_headdim."""

BLOCK = 128
"""Rows between one segment and the next in flash-attn's float32 sums."""


class Call(NamedTuple):
    """Shape of one backward call of a kernel."""

    tokens: int
    """Rows of all segments of queries."""
    keys: int
    """Rows of all segments of keys."""
    segments: int
    longest: int
    """Rows of the longest segment of queries."""
    heads: int
    key_heads: int
    head_dim: int
    itemsize: int
    """Bytes of a number of queries and keys."""
    is_causal: bool = True


def flash_bytes(call: Call) -> int:
    """Scratch of flash-attn, of its package and as torch ships it.

    Float32 sums of the queries' gradients, and their row sums, over T + 128*segments rows; the head width is
    rounded up to 32, above 128 to 64: 4*(T + 128*segments)*heads*(D' + 1). Where query heads share a head of
    keys, gradients of keys and values for every query head before they are summed: 2*a*keys*heads*D.
    """
    step = 32 if call.head_dim <= 128 else 64
    rows = call.tokens + BLOCK * call.segments
    sums = 4 * rows * call.heads * (rounded_up(call.head_dim, step) + 1)
    shares = call.key_heads != call.heads
    return sums + shares * 2 * call.itemsize * call.keys * call.heads * call.head_dim


def hopper_bytes(call: Call) -> int:
    """Scratch of FlashAttention-3 on a Hopper GPU.

    Its own head widths; rows are padded by one block a segment, and to whole blocks: 4*T'*heads*(D' + 2) with
    the row sums twice; of shared keys and values float32 sums, 2*4*keys'*key_heads*D'; and a number for every
    block of queries, head and segment. Blocks are those of kBlockM_sm90 and kBlockN_sm90, without a cap.
    """
    wide = hopper_width(call.head_dim)
    block = 128 if wide == 64 else 80 if wide == 128 and not call.is_causal else 64
    key_block = {192: 96, 256: 80}.get(wide, 128)
    rows = rounded_up(call.tokens + block * call.segments, block)
    keys = rounded_up(call.keys + key_block * call.segments, key_block)
    turns = 4 * -(-call.longest // block) * call.segments * call.heads
    shares = call.key_heads != call.heads
    return 4 * rows * call.heads * (wide + 2) + shares * 8 * keys * call.key_heads * wide + turns


def hopper_width(head_dim: int) -> int:
    """Width in which FlashAttention-3 computes a head."""
    return next(width for width in HOPPER_WIDTHS if width >= head_dim)


def rounded_up(number: int, step: int) -> int:
    """The next multiple of `step`."""
    return -(-number // step) * step
