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
        # Views of the whole row, made once: of each segment there is one view more.
        query_GKTD, out_GKTD = fold(query_THD, K), fold(out_THD, K)
        key_GKTD, value_GKTD = expand(key_TKD, H // K), expand(value_TKD, H // K)
        lse_GKT = lse_HT.view(K, H // K, T).transpose(0, 1)
        for q0, q1, k0, k1 in part.spans():
            queries, keys = (2, q0, q1 - q0), (2, k0, k1 - k0)
            out_GKLD, lse_GKL = cls.attended(
                query_GKTD.narrow(*queries),
                key_GKTD.narrow(*keys),
                value_GKTD.narrow(*keys),
                is_causal=part.is_causal,
                scale=scale,
            )
            out_GKTD.narrow(*queries).copy_(out_GKLD)
            lse_GKT.narrow(*queries).copy_(lse_GKL)
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
        G = H // K
        dq_THD = torch.empty_like(query_THD, memory_format=torch.contiguous_format)
        dk_TKD = torch.empty_like(key_TKD, memory_format=torch.contiguous_format)
        dv_TKD = torch.empty_like(value_TKD, memory_format=torch.contiguous_format)
        grad_GKTD, query_GKTD, out_GKTD = fold(grad_THD, K), fold(query_THD, K), fold(out_THD, K)
        key_GKTD, value_GKTD = expand(key_TKD, G), expand(value_TKD, G)
        lse_GKT = lse_HT.view(K, G, T).transpose(0, 1)
        dq_GKTD, dk_KTD, dv_KTD = fold(dq_THD, K), dk_TKD.transpose(0, 1), dv_TKD.transpose(0, 1)
        for q0, q1, k0, k1 in part.spans():
            queries, keys = (2, q0, q1 - q0), (2, k0, k1 - k0)
            dq_GKLD, dk_GKLD, dv_GKLD = cls.gradients(
                grad_GKTD.narrow(*queries),
                query_GKTD.narrow(*queries),
                key_GKTD.narrow(*keys),
                value_GKTD.narrow(*keys),
                out_GKTD.narrow(*queries),
                lse_GKT.narrow(*queries).contiguous(),
                is_causal=part.is_causal,
                scale=scale,
            )
            dq_GKTD.narrow(*queries).copy_(dq_GKLD)
            dk_KTD.narrow(1, k0, k1 - k0).copy_(_over_group(dk_GKLD))
            dv_KTD.narrow(1, k0, k1 - k0).copy_(_over_group(dv_GKLD))
        return dq_THD, dk_TKD, dv_TKD


def _over_group(gradient_GKLD: Tensor) -> Tensor:
    """[K, L, D]: the sum over the heads that share a key."""
    return gradient_GKLD[0] if gradient_GKLD.shape[0] == 1 else gradient_GKLD.sum(0)


def _lse_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def fold(segment_LHD: Tensor, K: int) -> Tensor:
    """[G, K, L, D] view: grouped heads go to the batch axis, so that keys are expanded, never repeated."""
    L, H, D = segment_LHD.shape
    return segment_LHD.unflatten(1, (K, H // K)).permute(2, 1, 0, 3)


def expand(segment_LKD: Tensor, G: int) -> Tensor:
    """[G, K, L, D] view of keys or values, shared by the G heads of a group."""
    return segment_LKD.transpose(0, 1)[None].expand(G, -1, -1, -1)
