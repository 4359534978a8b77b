"""Scratch of flash attention's backward kernels in a step: see hardware/flash_kernels.py."""

from __future__ import annotations

from memtrain.memory.estimate.context_parallel import num_gathered_kv
from memtrain.memory.estimate.workload import Workload, once
from memtrain.memory.hardware.flash_kernels import Call, flash_bytes, hopper_bytes

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
    Source: trainers/model/attention/two_part.py.
    """
    shape, window = load.shape, load.shape.sliding_window
    if window is None or window >= load.batch.longest or load.settings.attention == "transformers":
        return 0
    return load.a * load.N * (4 * shape.query_width + 4 * shape.kv_width)
