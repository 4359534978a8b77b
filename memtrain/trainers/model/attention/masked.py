"""The masked back end: every score, then a T x T mask. The reference that the others are tested against.

It runs on any device in any dtype and costs T x T x H numbers per layer: the last resort, and the definition.
"""

# T: tokens (I: as query, J: as key), H: query heads, K: key heads, G = H / K, D: head width.

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from memtrain.trainers.model.attention.row_layout import Layout, Part

# The mask is the same for all layers of one forward, and dies with its layout.
_masks: WeakKeyDictionary[Layout, Tensor] = WeakKeyDictionary()


def attend(query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, layout: Layout, scale: float) -> Tensor:
    """`out_THD` of the row by plain autograd; softmax in fp32 at least."""
    K = key_TKD.shape[1]
    query_TKGD = query_THD.unflatten(1, (K, -1))
    score_KGIJ = torch.einsum("ikgd,jkd->kgij", query_TKGD, key_TKD).mul(scale)
    score_KGIJ = score_KGIJ.to(torch.promote_types(score_KGIJ.dtype, torch.float32))
    if layout not in _masks:
        _masks[layout] = mask_of(layout)
    weight_KGIJ = score_KGIJ.masked_fill(~_masks[layout], float("-inf")).softmax(-1).to(value_TKD.dtype)
    return torch.einsum("kgij,jkd->ikgd", weight_KGIJ, value_TKD).flatten(1, 2)


def mask_of(layout: Layout) -> Tensor:
    """bool [I, J]: True where query i attends to key j. On the layout's device."""
    mask_IJ = torch.zeros(layout.num_tokens, layout.num_tokens, dtype=torch.bool, device=layout.device)
    _allow(mask_IJ, layout.within)
    if layout.to_prompt is not None:
        _allow(mask_IJ[layout.num_prompt_tokens :, : layout.num_prompt_tokens], layout.to_prompt)
    return mask_IJ


def _allow(mask_IJ: Tensor, part: Part) -> None:
    for q0, q1, k0, k1 in part.spans():
        block = mask_IJ[q0:q1, k0:k1]
        block.fill_(True)
        if part.is_causal:
            block.tril_()
