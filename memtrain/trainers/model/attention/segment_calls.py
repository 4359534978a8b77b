"""Calls of a kernel that takes segments of one length: all of a row where they are alike, else one by one."""

# T: tokens, S: segments of a call, L: tokens of each, H: query heads, K: key heads, G = H / K, D: head width.
# B and h of a call: S and a tensor's own heads, or, where query heads are folded onto key heads, G and K.

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor


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


@lru_cache(maxsize=8)
def segment_calls(
    query_bounds: tuple[int, ...], key_bounds: tuple[int, ...], num_folded: int
) -> SegmentCalls:
    """Calls of the segments between these bounds (see `row_layout.Part`), the same for every layer."""
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
