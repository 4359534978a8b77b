"""The CUDA back end: the variable-length flash kernels that torch ships; no flash-attn package is needed.

bf16 and fp16, compute capability 8.0 and up, head width up to 256 in steps of 8. `torch.nn.attention.varlen`
calls the same two operators, but its autograd takes no merged log-sum-exp.
"""

# T: tokens, H: query heads, K: key heads, D: head width.

from __future__ import annotations

import torch
from torch import Tensor

from memtrain.trainers.model.attention.row_layout import Part
from memtrain.trainers.model.attention.two_part import attend_by

aten = torch.ops.aten


class TorchFlash:
    """A varlen kernel call for each part."""

    @staticmethod
    def forward(
        query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, part: Part, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See `two_part.Kernel`."""
        out_THD, lse_HT, *_ = aten._flash_attention_forward(
            query_THD,
            key_TKD,
            value_TKD,
            part.cu_query,
            part.cu_key,
            part.max_query,
            part.max_key,
            0.0,
            part.is_causal,
            return_debug_mask=False,
            scale=scale,
        )
        return out_THD, lse_HT

    @staticmethod
    def backward(
        grad_THD: Tensor,
        query_THD: Tensor,
        key_TKD: Tensor,
        value_TKD: Tensor,
        out_THD: Tensor,
        lse_HT: Tensor,
        part: Part,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `two_part.Kernel`."""
        return aten._flash_attention_backward(
            grad_THD,
            query_THD,
            key_TKD,
            value_TKD,
            out_THD,
            lse_HT,
            part.cu_query,
            part.cu_key,
            part.max_query,
            part.max_key,
            0.0,
            part.is_causal,
            # Dropout's state, which a dropout of 0 never reads.
            torch.empty(2, dtype=torch.uint64, device=query_THD.device),
            torch.empty(0, device=query_THD.device),
            scale=scale,
        )


attend = attend_by(TorchFlash)
