"""The flash-attn back end: the variable-length kernels of the flash-attn package, 2.8 and up."""

# T: tokens, H: query heads, K: key heads, D: head width.

from __future__ import annotations

import torch
from torch import Tensor

from memtrain.trainers.model.attention.row_layout import Part
from memtrain.trainers.model.attention.two_part import attend_by


class PackageFlash:
    """A varlen kernel call for each part."""

    softcap = 0.0
    """Cap of the scores; 0: none."""

    @classmethod
    def forward(
        cls, query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, part: Part, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See `two_part.Kernel`."""
        from flash_attn.flash_attn_interface import _flash_attn_varlen_forward  # pyright: ignore

        out_THD, lse_HT, *_ = _flash_attn_varlen_forward(
            query_THD,
            key_TKD,
            value_TKD,
            part.cu_query,
            part.cu_key,
            part.max_query,
            part.max_key,
            dropout_p=0.0,
            softmax_scale=scale,
            causal=part.is_causal,
            softcap=cls.softcap,
        )
        return out_THD, lse_HT

    @classmethod
    def backward(
        cls,
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
        from flash_attn.flash_attn_interface import _flash_attn_varlen_backward  # pyright: ignore

        dq_THD = torch.empty_like(query_THD, memory_format=torch.contiguous_format)
        dk_TKD = torch.empty_like(key_TKD, memory_format=torch.contiguous_format)
        dv_TKD = torch.empty_like(value_TKD, memory_format=torch.contiguous_format)
        _flash_attn_varlen_backward(
            grad_THD,
            query_THD,
            key_TKD,
            value_TKD,
            out_THD,
            lse_HT,
            dq_THD,
            dk_TKD,
            dv_TKD,
            part.cu_query,
            part.cu_key,
            part.max_query,
            part.max_key,
            dropout_p=0.0,
            softmax_scale=scale,
            causal=part.is_causal,
            window_size_left=-1,
            window_size_right=-1,
            softcap=cls.softcap,
            alibi_slopes=None,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        return dq_THD, dk_TKD, dv_TKD


attend = attend_by(PackageFlash)
