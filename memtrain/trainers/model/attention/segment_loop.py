"""Kernels that take one segment a call, as kernels of a row: heads folded, results laid in their rows."""

# T: tokens, L: tokens of one segment, H: query heads, K: key heads, G = H / K, D: head width.

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from memtrain.trainers.model.attention.row_layout import Part


class SegmentLoop:
    """Kernel of `two_part`: one call per segment."""

    @classmethod
    @abstractmethod
    def attended(
        cls, query_GKLD: Tensor, key_GKLD: Tensor, value_GKLD: Tensor, /, *, is_causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """(`out_GKLD`, `lse_GKL`) of one segment."""

    @classmethod
    @abstractmethod
    def gradients(
        cls,
        grad_GKLD: Tensor,
        query_GKLD: Tensor,
        key_GKLD: Tensor,
        value_GKLD: Tensor,
        out_GKLD: Tensor,
        lse_GKL: Tensor,
        /,
        *,
        is_causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of query, key and value of one segment, each [G, K, L, D]."""

    @classmethod
    def forward(
        cls, query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, part: Part, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See `two_part.Kernel`."""
        T, H, _ = query_THD.shape
        K = key_TKD.shape[1]
        out_THD = torch.empty_like(query_THD, memory_format=torch.contiguous_format)
        lse_HT = query_THD.new_empty(H, T, dtype=_lse_dtype(query_THD))
        lse_KGT = lse_HT.view(K, H // K, T)
        for q0, q1, k0, k1 in part.spans():
            out_GKLD, lse_GKL = cls.attended(
                fold(query_THD[q0:q1], K),
                expand(key_TKD[k0:k1], H // K),
                expand(value_TKD[k0:k1], H // K),
                is_causal=part.is_causal,
                scale=scale,
            )
            out_THD[q0:q1] = unfold(out_GKLD)
            lse_KGT[:, :, q0:q1] = lse_GKL.transpose(0, 1)
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
        T, H, _ = query_THD.shape
        K = key_TKD.shape[1]
        lse_KGT = lse_HT.view(K, H // K, T)
        dq_THD = torch.empty_like(query_THD, memory_format=torch.contiguous_format)
        dk_TKD = torch.empty_like(key_TKD, memory_format=torch.contiguous_format)
        dv_TKD = torch.empty_like(value_TKD, memory_format=torch.contiguous_format)
        for q0, q1, k0, k1 in part.spans():
            dq_GKLD, dk_GKLD, dv_GKLD = cls.gradients(
                fold(grad_THD[q0:q1], K),
                fold(query_THD[q0:q1], K),
                expand(key_TKD[k0:k1], H // K),
                expand(value_TKD[k0:k1], H // K),
                fold(out_THD[q0:q1], K),
                lse_KGT[:, :, q0:q1].transpose(0, 1).contiguous(),
                is_causal=part.is_causal,
                scale=scale,
            )
            dq_THD[q0:q1] = unfold(dq_GKLD)
            dk_TKD[k0:k1] = dk_GKLD.sum(0).transpose(0, 1)
            dv_TKD[k0:k1] = dv_GKLD.sum(0).transpose(0, 1)
        return dq_THD, dk_TKD, dv_TKD


def _lse_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def fold(segment_LHD: Tensor, K: int) -> Tensor:
    """[G, K, L, D] view: grouped heads go to the batch axis, so that keys are expanded, never repeated."""
    L, H, D = segment_LHD.shape
    return segment_LHD.unflatten(1, (K, H // K)).permute(2, 1, 0, 3)


def unfold(folded_GKLD: Tensor) -> Tensor:
    """[L, H, D]: `fold` undone."""
    return folded_GKLD.permute(2, 1, 0, 3).flatten(1, 2)


def expand(segment_LKD: Tensor, G: int) -> Tensor:
    """[G, K, L, D] view of keys or values, shared by the G heads of a group."""
    return segment_LKD.transpose(0, 1)[None].expand(G, -1, -1, -1)
