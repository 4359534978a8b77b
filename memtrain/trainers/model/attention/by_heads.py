"""Attention over a row that several ranks hold, heads dealt out: each rank sees whole rows for some heads.

Before attention every rank sends each other the queries, keys and values of its tokens for that one's heads;
after it the outputs go back. So a rank attends to a whole `Layout`, by any back end, and no document sees
another. A key head that fewer query heads share than there are ranks for it is sent to each of them.

Source: Jacobs et al. 2023 (DeepSpeed Ulysses), arXiv:2309.14509, section 3.1.
"""

# L: tokens of this rank, R: ranks, T = R * L: tokens of the row, H: heads, h = H / R: of one rank, D: width.

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from memtrain.memory.rules.context_parallel import copies_of_keys
from memtrain.trainers.model.attention.row_layout import Layout
from memtrain.trainers.model.context_parallel.groups import ContextRanks
from memtrain.trainers.model.context_parallel.row_slices import RowPart

Attend = Callable[[Tensor, Tensor, Tensor, Layout, float], Tensor]


def attend_by_heads(
    query_LHD: Tensor, key_LKD: Tensor, value_LKD: Tensor, part: RowPart, scale: float, attend: Attend
) -> Tensor:
    """`out_LHD` of this rank's tokens, differentiable; called by all ranks of the group together."""
    ranks, heads = part.ranks, (query_LHD.shape[1], key_LKD.shape[1])
    copies = copies_of_keys(*heads, ranks.size)
    assert copies, f"{heads[0]} heads with {heads[1]} of keys cannot be dealt out to {ranks.size} ranks."
    key_LKD, value_LKD = (one.repeat_interleave(copies, 1) for one in (key_LKD, value_LKD))
    of_rank = [one.unflatten(1, (ranks.size, -1)) for one in (query_LHD, key_LKD, value_LKD)]
    dealt_ThD: Tensor = _Deal.apply(torch.cat(of_rank, 2), ranks)
    query_ThD, key_TkD, value_TkD = dealt_ThD.split([one.shape[2] for one in of_rank], 1)
    out_ThD = attend(query_ThD, key_TkD, value_TkD, part.whole, scale)
    out_LRhD: Tensor = _Return.apply(out_ThD, ranks)
    return out_LRhD.flatten(1, 2)


class _Deal(torch.autograd.Function):
    """[L, R, h, D] of this rank's tokens, by the rank of their heads, to [T, h, D] of this rank's heads."""

    @staticmethod
    def forward(ctx: Any, own_LRhD: Tensor, ranks: ContextRanks) -> Tensor:
        """All tokens of the row, in its order: rank after rank."""
        ctx.ranks = ranks
        return ranks.swap(own_LRhD.transpose(0, 1)).flatten(0, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """The way back."""
        ranks: ContextRanks = ctx.ranks
        return ranks.swap(grads[0].unflatten(0, (ranks.size, -1))).transpose(0, 1), None


class _Return(torch.autograd.Function):
    """`_Deal` undone: [T, h, D] of this rank's heads to [L, R, h, D] of its tokens."""

    @staticmethod
    def forward(ctx: Any, out_ThD: Tensor, ranks: ContextRanks) -> Tensor:
        """All heads of this rank's tokens."""
        ctx.ranks = ranks
        return ranks.swap(out_ThD.unflatten(0, (ranks.size, -1))).transpose(0, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """The way there."""
        return ctx.ranks.swap(grads[0].transpose(0, 1)).flatten(0, 1), None
