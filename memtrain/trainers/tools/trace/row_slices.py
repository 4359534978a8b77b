"""The slices of a row that a trace goes through: those at its ends, and the one that attends to most keys."""

from __future__ import annotations

from memtrain.trainers.model.attention.row_layout import Layout
from memtrain.trainers.model.context_parallel.row_slices import SlicedLayout
from memtrain.trainers.model.streamed.row_slices import RowSlice, slices_of

MOST = 4
"""Slices that stand for a row: the first, the heaviest between, and the last two, of which the backward pass
goes through the last first: in its second the sums of the first are there."""


def standing_slices(layout: Layout | SlicedLayout, slice_tokens: int) -> tuple[RowSlice, ...]:
    """The first and the last two of `slices_of`, and the heaviest between them, in their order.

    A slice is let go of before the next one begins, keys and sums of the row are there from the first one on,
    and slices of the same length that attend to fewer keys hold less.
    """
    every = slices_of(layout, slice_tokens)
    if len(every) <= MOST:
        return every
    return (every[0], max(every[1:-2], key=_num_keys), *every[-2:])


def _num_keys(part: RowSlice) -> int:
    """Keys outside the slice that its queries attend to."""
    return sum(reach.part.key_bounds[-1] for reach in (*part.reaches, *part.gathered))
