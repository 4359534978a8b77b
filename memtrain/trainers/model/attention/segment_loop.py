"""Kernels that take segments of one length, as kernels of a row: what each call gives is laid in its rows."""

# T: tokens, S: segments of a call, L: tokens of each, H: query heads, K: key heads, G = H / K, D: head width.
# B and h of a call: S and a tensor's own heads, or, where query heads are folded onto key heads, G and K.
# T: tokens, H: query heads, K: key heads, D: head width. B, h, S, L: of a call, see `segment_calls`.

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from memtrain.trainers.model.attention.row_layout import Part

# Calls of a kernel that takes segments of one length: all of a row where they are alike, else one by one.


@dataclass(frozen=True, slots=True)
class SegmentCalls:
    """A part of a row as calls, and tensors of the row as a view for each call."""

    query_lengths: tuple[int, ...]
    """Of each segment."""
    key_lengths: tuple[int, ...]
    num_folded: int
    """G, where keys are shared by the query heads of a group and the kernel takes as many of both; else 1."""
    is_one: bool
    """Whether one call gives the whole row: its results need no place beside their own."""

    def queries(self, row_TH: Tensor) -> tuple[Tensor, ...]:
        """[B, h, L, ...] of each call, of a tensor [T, H, ...] with a row for each query."""
        if self.num_folded == 1:
            return self._stacked(row_TH, self.query_lengths)
        return row_TH.unflatten(1, (-1, self.num_folded)).transpose(0, 2).split(self.query_lengths, 2)

    def keys(self, row_TKD: Tensor) -> tuple[Tensor, ...]:
        """[B, h, L, D] of each call, of keys or values: shared by the G heads of a group, never repeated."""
        if self.num_folded == 1:
            return self._stacked(row_TKD, self.key_lengths)
        return row_TKD.transpose(0, 1)[None].expand(self.num_folded, -1, -1, -1).split(self.key_lengths, 2)

    def key_sums(self, row_TKD: Tensor) -> tuple[Tensor, ...]:
        """[1, K, L, D] of each segment, where `write_sum` puts gradients of keys or values."""
        return self._stacked(row_TKD, self.key_lengths)

    def _stacked(self, row_Th: Tensor, lengths: tuple[int, ...]) -> tuple[Tensor, ...]:
        if self.is_one:
            return (row_Th.view(len(lengths), -1, *row_Th.shape[1:]).transpose(1, 2),)
        # Views of the whole row, made once: of each segment there is one view more.
        return row_Th.transpose(0, 1)[None].split(lengths, 2)


def segment_calls(
    query_bounds: tuple[int, ...], key_bounds: tuple[int, ...], num_folded: int
) -> SegmentCalls:
    """Calls of the segments between these bounds (see `row_layout.Part`)."""
    queries, keys = (
        tuple(end - start for start, end in pairwise(bounds)) for bounds in (query_bounds, key_bounds)
    )
    is_one = num_folded == 1 and len(set(queries)) == len(set(keys)) == 1
    return SegmentCalls(queries, keys, num_folded, is_one)


def rows_of(result_ShLD: Tensor) -> Tensor:
    """[T, h, D] of what one call gives for a whole row; a view, as kernels lay it out."""
    return result_ShLD.transpose(1, 2).flatten(0, 1)


def write_sum(gradient_BKLD: Tensor, into_1KLD: Tensor) -> None:
    """Write a segment's gradients of keys, or their sum over the heads that share a key, rounded once."""
    if len(gradient_BKLD) == 1:
        into_1KLD.copy_(gradient_BKLD)
    elif len(gradient_BKLD) == 2:
        # A reduction over so few takes several times as long.
        torch.add(gradient_BKLD[0], gradient_BKLD[1], out=into_1KLD[0])
    else:
        torch.sum(gradient_BKLD, 0, out=into_1KLD[0])


class SegmentLoop:
    """A kernel of `two_part` that is called once where all segments are of one length, else for each."""

    @classmethod
    def shares_keys(cls, dtype: torch.dtype) -> bool:  # noqa: ARG003
        """Whether the kernel takes fewer heads of keys than of queries, and sums the keys' gradients."""
        return False

    @classmethod
    @abstractmethod
    def attended(
        cls, query_BhLD: Tensor, key_BhLD: Tensor, value_BhLD: Tensor, /, *, is_causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """(`out_BhLD`, `lse_BhL`) of a call."""

    @classmethod
    @abstractmethod
    def gradients(
        cls,
        grad_BhLD: Tensor,
        query_BhLD: Tensor,
        key_BhLD: Tensor,
        value_BhLD: Tensor,
        out_BhLD: Tensor,
        lse_BhL: Tensor,
        /,
        *,
        is_causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of query, key and value of a call, in their shapes."""

    @classmethod
    def forward(
        cls, query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, part: Part, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See `two_part.Kernel`."""
        T, H, _ = query_THD.shape
        calls = cls.calls_of(query_THD, key_TKD, part)
        given = zip(calls.queries(query_THD), calls.keys(key_TKD), calls.keys(value_TKD), strict=True)
        if calls.is_one:
            out_SHLD, lse_SHL = cls.attended(*next(given), is_causal=part.is_causal, scale=scale)
            return rows_of(out_SHLD), lse_SHL.transpose(0, 1).reshape(H, T).contiguous()
        out_THD = torch.empty_like(query_THD, memory_format=torch.contiguous_format)
        lse_HT = query_THD.new_empty(H, T, dtype=_lse_dtype(query_THD))
        into = zip(calls.queries(out_THD), calls.queries(lse_HT.t()), strict=True)
        for of_call, (out_into_BhLD, lse_into_BhL) in zip(given, into, strict=True):
            out_BhLD, lse_BhL = cls.attended(*of_call, is_causal=part.is_causal, scale=scale)
            out_into_BhLD.copy_(out_BhLD)
            lse_into_BhL.copy_(lse_BhL)
            del out_BhLD, lse_BhL
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
        calls = cls.calls_of(query_THD, key_TKD, part)
        given = zip(
            *(calls.queries(one) for one in (grad_THD, query_THD)),
            *(calls.keys(one) for one in (key_TKD, value_TKD)),
            *(calls.queries(one) for one in (out_THD, lse_HT.t())),
            strict=True,
        )
        if calls.is_one:
            dq_SHLD, dk_SKLD, dv_SKLD = cls.gradients(*next(given), is_causal=part.is_causal, scale=scale)
            return rows_of(dq_SHLD), rows_of(dk_SKLD), rows_of(dv_SKLD)
        dq_THD = torch.empty_like(query_THD, memory_format=torch.contiguous_format)
        dk_TKD = torch.empty_like(key_TKD, memory_format=torch.contiguous_format)
        dv_TKD = torch.empty_like(value_TKD, memory_format=torch.contiguous_format)
        into = zip(calls.queries(dq_THD), calls.key_sums(dk_TKD), calls.key_sums(dv_TKD), strict=True)
        for of_call, (dq_into_BhLD, dk_into_1KLD, dv_into_1KLD) in zip(given, into, strict=True):
            dq_BhLD, dk_BhLD, dv_BhLD = cls.gradients(*of_call, is_causal=part.is_causal, scale=scale)
            dq_into_BhLD.copy_(dq_BhLD)
            write_sum(dk_BhLD, dk_into_1KLD)
            write_sum(dv_BhLD, dv_into_1KLD)
            # Not beside the results of the next call.
            del dq_BhLD, dk_BhLD, dv_BhLD
        return dq_THD, dk_TKD, dv_TKD

    @classmethod
    def calls_of(cls, query_THD: Tensor, key_TKD: Tensor, part: Part) -> SegmentCalls:
        """Calls by which a part of a row is attended to."""
        num_folded = 1 if cls.shares_keys(query_THD.dtype) else query_THD.shape[1] // key_TKD.shape[1]
        if num_folded not in part.calls:
            part.calls[num_folded] = segment_calls(part.query_bounds, part.key_bounds, num_folded)
        return part.calls[num_folded]


def _lse_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32
