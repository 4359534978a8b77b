"""The FlexAttention back end: a compiled kernel with a block mask; CUDA, fp32 too, any head width."""

# T: tokens (I: as query, J: as key), H: query heads, K: key heads, D: head width.

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from memtrain.trainers.model.attention.row_layout import Layout

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

    return create_block_mask(attends, None, None, T, T, device=str(device))


@cache
def _kernel(device_type: str) -> Callable[..., Tensor]:
    # Rows differ in length from batch to batch: one dynamic kernel instead of a compilation each.
    return torch.compile(flex_attention, dynamic=True) if device_type == "cuda" else flex_attention
