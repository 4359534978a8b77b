"""The FlexAttention back end: a compiled kernel with a block mask; CUDA, fp32 too, any head width."""

# T: tokens (I: as query, J: as key), A, B: blocks of queries and keys, H, K: heads of both, D: head width.

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, FlexKernelOptions, flex_attention

from memtrain.trainers.model.attention.row_layout import Layout, Part

BLOCK = 128
"""Tokens of a block of the mask: torch's own."""
OPTIONS: FlexKernelOptions = {"BACKEND": "TRITON"}
"""Choice of one kernel for rows of any length. torch's own for fewer than 128 tokens, a kernel for decoding,
takes the queries of heads that share keys for one block, and has no form where they are more than a block of
the mask: "NoValidChoicesError" (torch 2.10 to 2.13, torch/_inductor/kernel/flex/flex_decoding.py)."""

# The block mask is the same for all layers of one forward, and dies with its layout.
_block_masks: WeakKeyDictionary[Layout, BlockMask] = WeakKeyDictionary()


def attend(query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, layout: Layout, scale: float) -> Tensor:
    """`out_THD` of the row, differentiable."""
    if layout not in _block_masks:
        _block_masks[layout] = block_mask_of(layout)
    out_1HTD = _kernel(query_THD.device.type)(
        query_THD.transpose(0, 1)[None],
        key_TKD.transpose(0, 1)[None],
        value_TKD.transpose(0, 1)[None],
        block_mask=_block_masks[layout],
        scale=scale,
        enable_gqa=query_THD.shape[1] != key_TKD.shape[1],
        kernel_options=OPTIONS,
    )
    return out_1HTD[0].transpose(0, 1)


def block_mask_of(layout: Layout) -> BlockMask:
    """The layout as a block mask on its device, by the numbers of segments and of completions' prompts."""
    T, device = layout.num_tokens, layout.device
    row_T = torch.arange(T, device=device, dtype=torch.int32)
    # Searching in the cumulative lengths asks the device for nothing, unlike repeat_interleave.
    segment_T = torch.searchsorted(layout.within.cu_query, row_T, right=True)
    prompt_T = torch.full_like(segment_T, -1)
    if layout.to_prompt is not None:
        tail_T = row_T[layout.num_prompt_tokens :] - layout.num_prompt_tokens
        # Prompts are the first segments, so that group g's prompt is segment number g.
        prompt_T[layout.num_prompt_tokens :] = torch.searchsorted(
            layout.to_prompt.cu_query, tail_T, right=True
        )

    def attends(_batch: Tensor, _head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return ((segment_T[i] == segment_T[j]) & (i >= j)) | (prompt_T[i] == segment_T[j])

    kept_AB, full_AB = (torch.from_numpy(one).to(device) for one in blocks_of(layout))
    partial = _ordered(kept_AB & ~full_AB)
    whole = _ordered(full_AB)
    return BlockMask.from_kv_blocks(*partial, *whole, BLOCK_SIZE=BLOCK, mask_mod=attends, seq_lengths=(T, T))


def blocks_of(layout: Layout) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """bool [A, B] twice: blocks in which any query attends to any key, and those in which all do to all.

    From the bounds of the segments, on the host: no mask of T x T numbers is made on the way.
    """
    blocks = -(-layout.num_tokens // BLOCK)
    kept_AB, full_AB = (np.zeros((blocks, blocks), np.bool_) for _ in range(2))
    _add(kept_AB, full_AB, layout.within, 0)
    if layout.to_prompt is not None:
        _add(kept_AB, full_AB, layout.to_prompt, layout.num_prompt_tokens)
    return kept_AB, full_AB


def _add(kept_AB: NDArray[np.bool_], full_AB: NDArray[np.bool_], part: Part, first: int) -> None:
    """Mark the blocks of every segment of a part, whose queries begin at token `first`."""
    for q0, q1, k0, k1 in part.spans():
        q0, q1 = q0 + first, q1 + first
        a, b = np.arange(q0 // BLOCK, -(-q1 // BLOCK)), np.arange(k0 // BLOCK, -(-k1 // BLOCK))
        place = np.s_[a[0] : a[-1] + 1, b[0] : b[-1] + 1]
        whole_A = (a * BLOCK >= q0) & ((a + 1) * BLOCK <= q1)
        whole_B = (b * BLOCK >= k0) & ((b + 1) * BLOCK <= k1)
        meets, covers = np.True_, whole_A[:, None] & whole_B
        if part.is_causal:
            last_query_A, first_key_B = np.minimum(q1, (a + 1) * BLOCK) - 1, np.maximum(k0, b * BLOCK)
            meets = first_key_B <= last_query_A[:, None]
            covers &= (b + 1) * BLOCK - 1 <= (a * BLOCK)[:, None]
        kept_AB[place] |= meets
        full_AB[place] |= covers


def _ordered(mask_AB: Tensor) -> tuple[Tensor, Tensor]:
    """(int32 [1, 1, A] how many blocks a row has, int32 [1, 1, A, B] their numbers, first those it has)."""
    count_A = mask_AB.sum(-1, dtype=torch.int32)
    index_AB = mask_AB.to(torch.int8).argsort(dim=-1, descending=True, stable=True).to(torch.int32)
    return count_A[None, None], index_AB[None, None].contiguous()


@cache
def _kernel(device_type: str) -> Callable[..., Tensor]:
    # Rows differ in length from batch to batch: one dynamic kernel instead of a compilation each.
    return torch.compile(flex_attention, dynamic=True) if device_type == "cuda" else flex_attention
