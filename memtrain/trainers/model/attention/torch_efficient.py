"""The memory-efficient back end: segment by segment on torch's kernel for GPUs without flash kernels.

float16 and float32 from compute capability 5.0 on (T4, V100), bfloat16 from 8.0 on; no scores of row length
squared. Not run on a GPU yet: the start-up check holds every run to what its rows are alone.
"""

# T: tokens, L: of one segment, P: L rounded up to 32, H: query heads, K: key heads, G = H / K, D: head width.

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from memtrain.trainers.model.attention.row_layout import Layout, Part
from memtrain.trainers.model.attention.torch_cpu import expand, fold, unfold
from memtrain.trainers.model.attention.two_part import TwoPartAttention

aten = torch.ops.aten
LSE_MULTIPLE = 32
"""A segment's log-sum-exp is as long as the next multiple of it for the kernel; behind it lies infinity.

Source: aten/src/ATen/native/transformers/cuda/mem_eff_attention/kernel_forward.h (kAlignLSE).
"""


def attend(query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, layout: Layout, scale: float) -> Tensor:
    """`out_THD` of the row, differentiable."""
    out_THD: Tensor = TwoPartAttention.apply(query_THD, key_TKD, value_TKD, layout, scale, MemoryEfficient)
    return out_THD


class MemoryEfficient:
    """Kernel of `two_part`: one call per segment."""

    @staticmethod
    def forward(
        query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, part: Part, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See `two_part.Kernel`."""
        T, H, _ = query_THD.shape
        K = key_TKD.shape[1]
        out_THD = torch.empty_like(query_THD, memory_format=torch.contiguous_format)
        lse_HT = query_THD.new_empty(H, T, dtype=torch.float32)
        lse_KGT = lse_HT.view(K, H // K, T)
        for q0, q1, k0, k1 in part.spans():
            out_GKLD, lse_GKP, *_ = aten._scaled_dot_product_efficient_attention(
                fold(query_THD[q0:q1], K),
                expand(key_TKD[k0:k1], H // K),
                expand(value_TKD[k0:k1], H // K),
                None,
                True,
                0.0,
                part.is_causal,
                scale=scale,
            )
            out_THD[q0:q1] = unfold(out_GKLD)
            lse_KGT[:, :, q0:q1] = lse_GKP[..., : q1 - q0].transpose(0, 1)
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
        T, H, _ = query_THD.shape
        K = key_TKD.shape[1]
        lse_KGT = lse_HT.view(K, H // K, T)
        dq_THD, dk_TKD, dv_TKD = (torch.zeros_like(one) for one in (query_THD, key_TKD, value_TKD))
        # Dropout's state, which a dropout of 0 never reads.
        state = torch.zeros(2, dtype=torch.int64, device=query_THD.device)
        for q0, q1, k0, k1 in part.spans():
            behind = -(q1 - q0) % LSE_MULTIPLE
            lse_GKP = F.pad(lse_KGT[:, :, q0:q1].transpose(0, 1), (0, behind), value=float("inf"))
            dq_GKLD, dk_GKLD, dv_GKLD, _ = aten._scaled_dot_product_efficient_attention_backward(
                fold(grad_THD[q0:q1], K),
                fold(query_THD[q0:q1], K),
                expand(key_TKD[k0:k1], H // K),
                expand(value_TKD[k0:k1], H // K),
                None,
                fold(out_THD[q0:q1], K),
                lse_GKP.contiguous(),
                state[0],
                state[1],
                0.0,
                [True, True, True, False],
                part.is_causal,
                scale=scale,
            )
            dq_THD[q0:q1] = unfold(dq_GKLD)
            dk_TKD[k0:k1] = dk_GKLD.sum(0).transpose(0, 1)
            dv_TKD[k0:k1] = dv_GKLD.sum(0).transpose(0, 1)
        return dq_THD, dk_TKD, dv_TKD
