"""The memory-efficient back end: segment by segment on torch's kernel for GPUs without flash kernels.

float16 and float32 from compute capability 5.0 on (T4, V100), bfloat16 from 8.0 on; no scores of row length
squared.
"""

# T: tokens, L: of one segment, P: L rounded up to 32, H: query heads, K: key heads, G = H / K, D: head width.

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from memtrain.trainers.model.attention.segment_loop import SegmentLoop
from memtrain.trainers.model.attention.two_part import attend_by

aten = torch.ops.aten
LSE_MULTIPLE = 32
"""A segment's log-sum-exp is as long as the next multiple of it for the kernel; behind it lies infinity.

Source: aten/src/ATen/native/transformers/cuda/mem_eff_attention/kernel_forward.h (kAlignLSE).
"""


class MemoryEfficient(SegmentLoop):
    """Segments on the memory-efficient kernel."""

    @classmethod
    def attended(
        cls, query_GKLD: Tensor, key_GKLD: Tensor, value_GKLD: Tensor, *, is_causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See `SegmentLoop`."""
        out_GKLD, lse_GKP, *_ = aten._scaled_dot_product_efficient_attention(
            query_GKLD, key_GKLD, value_GKLD, None, True, 0.0, is_causal, scale=scale
        )
        return out_GKLD, lse_GKP[..., : query_GKLD.shape[2]]

    @classmethod
    def gradients(
        cls,
        grad_GKLD: Tensor,
        query_GKLD: Tensor,
        key_GKLD: Tensor,
        value_GKLD: Tensor,
        out_GKLD: Tensor,
        lse_GKL: Tensor,
        *,
        is_causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `SegmentLoop`.

        In half precision the kernel takes tokens of the output to lie h x D numbers apart, whatever their
        stride: outputs of query heads that are folded onto key heads are laid so.
        Source: torch 2.11, aten/src/ATen/native/transformers/cuda/mem_eff_attention/kernel_backward.h
        (`o_strideM`).
        """
        out_GKLD = out_GKLD.transpose(1, 2).contiguous().transpose(1, 2)
        # Dropout's state, which a dropout of 0 never reads.
        state = torch.empty(2, dtype=torch.int64, device=query_GKLD.device)
        dq_GKLD, dk_GKLD, dv_GKLD, _ = aten._scaled_dot_product_efficient_attention_backward(
            grad_GKLD,
            query_GKLD,
            key_GKLD,
            value_GKLD,
            None,
            out_GKLD,
            F.pad(lse_GKL.contiguous(), (0, -lse_GKL.shape[-1] % LSE_MULTIPLE), value=float("inf")),
            state[0],
            state[1],
            0.0,
            [True, True, True, False],
            is_causal,
            scale=scale,
        )
        return dq_GKLD, dk_GKLD, dv_GKLD


attend = attend_by(MemoryEfficient)
