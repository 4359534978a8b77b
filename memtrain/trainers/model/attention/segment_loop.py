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
        queries, keys = part.lengths()
        segments = zip(
            *(one.split(queries, 2) for one in (query_GKTD, out_GKTD, lse_GKT)),
            *(one.split(keys, 2) for one in (key_GKTD, value_GKTD)),
            strict=True,
        )
        for query_GKLD, into_GKLD, lse_into_GKL, key_GKLD, value_GKLD in segments:
            out_GKLD, lse_GKL = cls.attended(
                query_GKLD, key_GKLD, value_GKLD, is_causal=part.is_causal, scale=scale
            )
            into_GKLD.copy_(out_GKLD)
            lse_into_GKL.copy_(lse_GKL)
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
        queries, keys = part.lengths()
        segments = zip(
            *(one.split(queries, 2) for one in (grad_GKTD, query_GKTD, out_GKTD, lse_GKT, dq_GKTD)),
            *(one.split(keys, 2) for one in (key_GKTD, value_GKTD)),
            *(one.split(keys, 1) for one in (dk_KTD, dv_KTD)),
            strict=True,
        )
        for (
            grad_GKLD,
            query_GKLD,
            out_GKLD,
            lse_GKL,
            into_GKLD,
            key_GKLD,
            value_GKLD,
            dk_KLD,
            dv_KLD,
        ) in segments:
            dq_GKLD, dk_GKLD, dv_GKLD = cls.gradients(
                grad_GKLD,
                query_GKLD,
                key_GKLD,
                value_GKLD,
                out_GKLD,
                lse_GKL.contiguous(),
                is_causal=part.is_causal,
                scale=scale,
            )
            into_GKLD.copy_(dq_GKLD)
            write_sum(dk_GKLD, dk_KLD)
            write_sum(dv_GKLD, dv_KLD)
        return dq_THD, dk_TKD, dv_TKD


def write_sum(gradient_GKLD: Tensor, into_KLD: Tensor) -> None:
    """Write the sum over the G heads that share a key, rounded once."""
    if len(gradient_GKLD) == 1:
        into_KLD.copy_(gradient_GKLD[0])
    elif len(gradient_GKLD) == 2:
        # A reduction over so few takes several times as long.
        torch.add(gradient_GKLD[0], gradient_GKLD[1], out=into_KLD)
    else:
        torch.sum(gradient_GKLD, 0, out=into_KLD)


def _lse_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def fold(segment_LHD: Tensor, K: int) -> Tensor:
    """[G, K, L, D] view: grouped heads go to the batch axis, so that keys are expanded, never repeated."""
    L, H, D = segment_LHD.shape
    return segment_LHD.unflatten(1, (K, H // K)).permute(2, 1, 0, 3)


def expand(segment_LKD: Tensor, G: int) -> Tensor:
    """[G, K, L, D] view of keys or values, shared by the G heads of a group."""
    return segment_LKD.transpose(0, 1)[None].expand(G, -1, -1, -1)
