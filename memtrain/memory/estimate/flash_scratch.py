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

from memtrain.memory.estimate.context_parallel import num_gathered_kv
from memtrain.memory.estimate.workload import Workload, once

SCRATCH = "kernel scratch"
"""Owner of a kernel's scratch memory."""

HOPPER_FLASH = "flash3"
"""The back end whose kernels are for Hopper alone."""

FLEX = "flex"
"""The back end whose kernels are compiled from a rule of scores."""

MASKED = "masked"
"""The back end that holds every score, and a mask of all pairs of tokens."""

FLASH = ("torch_varlen", "flash", HOPPER_FLASH)
"""Back ends on variable-length flash kernels for CUDA."""

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


@once
def flash_scratch(load: Workload) -> int:
    """Scratch of the largest backward call of a layer's attention: every segment to itself.

    Where heads are dealt out, a process has the whole row for some of them. Where keys are gathered, a call
    may have more keys than rows.
    """
    shape, settings = load.shape, load.settings
    if settings.device != "cuda" or settings.attention not in FLASH:
        return 0
    by_heads = settings.context_by == "ulysses"
    tokens = load.num_whole if by_heads else load.N
    heads = shape.num_heads // (settings.context_parallel if by_heads else 1)
    call = Call(
        tokens=tokens,
        keys=max(tokens, num_gathered_kv(load)),
        segments=num_segments(load, tokens),
        longest=min(load.batch.longest, tokens),
        heads=heads,
        key_heads=heads * shape.kv_width // shape.query_width,
        head_dim=shape.head_dim,
        itemsize=load.a,
    )
    return hopper_bytes(call) if settings.attention == HOPPER_FLASH else flash_bytes(call)


def num_segments(load: Workload, tokens: int) -> int:
    """Most segments of one call over `tokens` rows.

    Those of the micro-batch and of the padding behind them (a prompt and an answer where prompts are shared);
    one more where a process holds a part of the row; one more for each whole window, of which a sliding
    window makes blocks.
    """
    settings, window = load.settings, load.shape.sliding_window
    count = load.batch.num_segments
    if settings.padding_free and settings.pad_to_multiple_of and load.num_whole > load.batch.tokens:
        count += 1 + settings.shared_prompts
    if settings.context_parallel > 1 and settings.context_by != "ulysses":
        count += 1
    if window is not None and window < load.batch.longest:
        count += tokens // window
    return min(count, tokens)


@once
def windows_backward(load: Workload) -> int:
    """Copies and gradients of the rows that look past their block of a sliding window, at most all.

    Of query, output and its gradient, key and value; gradients of query, key and value.
    Source: trainers/model/attention/windows.py.
    """
    shape, window = load.shape, load.shape.sliding_window
    if window is None or window >= load.batch.longest or load.settings.attention == "transformers":
        return 0
    return load.a * load.N * (4 * shape.query_width + 4 * shape.kv_width)
