"""The ranks that hold one row together, and their exchange: keys, their gradients, and sums."""

# R: ranks of the group, C: what one sends another, such as tokens, N: numbers.

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

# torch 2.13 renamed the pair, and warns at the old names.
_gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
_scatter = (
    dist.reduce_scatter_single if hasattr(dist, "reduce_scatter_single") else dist.reduce_scatter_tensor
)


@dataclass(frozen=True, slots=True)
class ContextRanks:
    """Rank of this process among the ranks that hold the same row. All of them call every method,
    in one order."""

    index: int
    """Slice of the row that this rank holds."""
    size: int
    """Number of ranks that hold the row."""
    group: dist.ProcessGroup | None = None
    """Process group of these ranks; None for the whole world."""
    by_heads: bool = False
    """In attention each takes some heads of the whole row; else its slice, and keys are gathered."""

    def gather(self, own_C: Tensor) -> Tensor:
        """[R * C, ...]: the tensors of all ranks, in their order. No gradient."""
        all_RC = own_C.new_empty(self.size * own_C.shape[0], *own_C.shape[1:])
        _gather(all_RC, own_C.contiguous(), group=self.group)
        return all_RC

    def scatter(self, all_RC: Tensor) -> Tensor:
        """[C, ...]: this rank's part of the sum over the ranks of tensors as `gather` makes them."""
        own_C = all_RC.new_empty(all_RC.shape[0] // self.size, *all_RC.shape[1:])
        _scatter(own_C, all_RC.contiguous(), group=self.group)
        return own_C

    def swap(self, own_RC: Tensor) -> Tensor:
        """[R, ...]: each rank's part for this rank, in their order; part r of `own_RC` goes to rank r."""
        their_RC = torch.empty_like(own_RC, memory_format=torch.contiguous_format)
        dist.all_to_all_single(their_RC, own_RC.contiguous(), group=self.group)
        return their_RC

    def sum(self, own_N: Tensor) -> Tensor:
        """[N], summed over the ranks; differentiable, see `_SumOverSlices`."""
        total_N: Tensor = _SumOverSlices.apply(own_N, self)
        return total_N


class _SumOverSlices(torch.autograd.Function):
    """The sum over the ranks of a group, the same on each of them.

    Every rank goes on to compute the same loss from the same numbers, and brings an R-th of it into the sum
    over the ranks (`context_parallel.Shared`). So what comes back here is an R-th of the gradient, equal on
    all ranks, and R times that is the gradient of the loss: nothing is exchanged. Without the R-th, weights
    would get gradients R times too large, which Adam and clipping hide.
    """

    @staticmethod
    def forward(ctx: Any, own_N: Tensor, ranks: ContextRanks) -> Tensor:
        """The sum."""
        ctx.size = ranks.size
        total_N = own_N.clone()
        dist.all_reduce(total_N, group=ranks.group)
        return total_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """R times the returned gradient."""
        return grads[0] * ctx.size, None


def make_context(size: int, *, by_heads: bool = False) -> ContextRanks | None:
    """The group of this rank, of `size` neighbours; None where every rank holds rows of its own.

    Called by all ranks of the run together. Neighbours are on one node where it has room for them.
    """
    if size == 1:
        return None
    rank, world = dist.get_rank(), dist.get_world_size()
    assert world % size == 0, f"{world} processes are not divided into groups of {size}."
    # Of its own even where it is the whole world: gradients are under way there during the backward pass.
    groups = [dist.new_group(list(range(first, first + size))) for first in range(0, world, size)]
    return ContextRanks(rank % size, size, cast(dist.ProcessGroup, groups[rank // size]), by_heads)
