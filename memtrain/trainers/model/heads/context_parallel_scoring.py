"""Answers about whole rows, from the slices of them that several ranks hold."""

# B rows, T tokens of a row, L tokens of a slice, N scored tokens (n of them in the slice), A answers

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from memtrain.trainers.model.attention.row_layout import Layout, even_layout
from memtrain.trainers.model.context_parallel.groups import ContextRanks
from memtrain.trainers.model.context_parallel.row_slices import RowPart, SlicedLayout, part_of_row, slice_of

Answer = TypeVar("Answer", bound=tuple[Tensor | None, ...])
Ask = Callable[[dict[str, Any], Tensor, Tensor], Answer]
"""(inputs of the slice, rows of its hidden states [n], which of the N they are [n]) -> a named tuple."""


def over_slices(ranks: ContextRanks, inputs: dict[str, Any], rows_N: Tensor, ask: Ask[Answer]) -> Answer:
    """Answer of `ask` about rows `rows_N` of the flattened hidden states [B * T, D], on every rank.

    Each rank asks about the rows in its slice. Fields of the answer are per row [n], and become [N], or are
    sums over rows, and become the sum over all: differentiable as `ContextRanks.sum` is. A row's target
    is in the question, so a token that is predicted from the other side of a border is nothing special.
    """
    own_inputs, layout = sliced(inputs, ranks)
    place_T = torch.full((layout.num_tokens * ranks.size,), -1, device=rows_N.device)
    place_T[layout.index] = torch.arange(layout.num_tokens, device=rows_N.device)
    place_N = place_T[rows_N]
    which_n = (place_N >= 0).nonzero()[:, 0]
    answer = ask(own_inputs, place_N[which_n], which_n)
    return _whole(answer, which_n, len(rows_N), ranks)


def sliced(inputs: dict[str, Any], ranks: ContextRanks) -> tuple[dict[str, Any], SlicedLayout | RowPart]:
    """A backbone's inputs [B, T] as this rank's slice [1, L], and its layout.

    Padded rows become segments of one row: their padding stands behind every token that is scored.
    """
    ids_BT, positions_BT = inputs["input_ids"], inputs["position_ids"]
    layout = cast(Layout | None, inputs.get("layout"))
    if layout is None:
        B, T = ids_BT.shape
        layout = even_layout(B, T, ids_BT.device)
    own = part_of_row(layout, ranks) if ranks.by_heads else slice_of(layout, ranks)
    taken = {
        "input_ids": ids_BT.reshape(1, -1)[:, own.index],
        "position_ids": positions_BT.reshape(1, -1)[:, own.index],
    }
    return taken | {"layout": own}, own


def _whole(answer: Answer, which_n: Tensor, num_rows: int, ranks: ContextRanks) -> Answer:
    """The fields of an answer summed, or put in their places, in one exchange of them all."""
    parts: list[Tensor] = []
    for field in answer:
        if field is not None:
            wide = field.to(torch.promote_types(field.dtype, torch.float32))
            parts.append(
                wide[None] if field.dim() == 0 else wide.new_zeros(num_rows).index_copy(0, which_n, wide)
            )
    summed = iter(ranks.sum(torch.cat(parts)).split([len(part) for part in parts]))
    fields = [None if field is None else _as_was(next(summed), field) for field in answer]
    return cast(Any, answer)._make(fields)


def _as_was(whole: Tensor, field: Tensor) -> Tensor:
    return (whole[0] if field.dim() == 0 else whole).to(field.dtype)
