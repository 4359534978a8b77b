"""A flattened row, or a rank's part of one, in slices, and the tokens that each slice's queries attend to."""

# T: tokens of the row, S: tokens of a slice.

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch import Tensor

from memtrain.trainers.model.attention.row_layout import Layout, Part, part_of
from memtrain.trainers.model.attention.two_part import Reach, windowed
from memtrain.trainers.model.context_parallel.row_slices import Look, SlicedLayout, looks_of, pieces_of
from memtrain.trainers.model.context_parallel.windowed_rows import seen_by


@dataclass(frozen=True, slots=True, eq=False)
class RowSlice:
    """Tokens `begin:end` of a row, and who attends to whom from there.

    within: the slice's pieces of segments, each to itself, causal.
    reaches: what its queries attend to besides; keys are rows of the whole row.
    key_blocks: the same keys, at most as many at a time as a slice has tokens: the backward pass makes
        gradients of keys for every query head before it sums them, and blocks bound these.
    places: int64 [S], the place of each of its tokens in its own row.
    longest_span: most tokens that a query of the row can look back on, itself counted.
    row: the whole row, which outlives its slices.
    gathered: of a rank's part, what its queries attend to besides, in blocks as well; keys are rows of the
        tokens that the ranks gather.
    """

    begin: int
    end: int
    places: Tensor
    within: Part
    reaches: tuple[Reach, ...]
    key_blocks: tuple[Reach, ...]
    longest_span: int
    row: ReferenceType[Layout | SlicedLayout]
    gathered: tuple[Reach, ...] = ()

    def under(self, window: int | None) -> RowSlice:
        """The slice where a token attends to `window` tokens, itself counted; None: to all before it."""
        if window is None:
            return self
        layout = self.row()
        assert layout is not None, "The row outlives its slices."
        if isinstance(layout, Layout):
            pattern, gathered = windowed(layout, window, self.begin, self.end), self.gathered
        else:
            pattern, gathered = seen_by(layout, window, self.begin, self.end)
        return replace(
            self,
            within=pattern.within,
            reaches=pattern.reaches,
            key_blocks=pattern.reaches,
            gathered=gathered,
        )

    @property
    def num_tokens(self) -> int:
        """Tokens of the slice."""
        return self.end - self.begin


# Slices are the same for all layers of one pass, and die with the layout.
_cut: WeakKeyDictionary[Layout | SlicedLayout, tuple[int, tuple[RowSlice, ...]]] = WeakKeyDictionary()


def slices_of(layout: Layout | SlicedLayout, slice_tokens: int) -> tuple[RowSlice, ...]:
    """`layout` in slices of `slice_tokens` tokens, the last one shorter, on the layout's device."""
    known = _cut.get(layout)
    if known is None or known[0] != slice_tokens:
        T = layout.num_tokens
        borders = [(begin, min(begin + slice_tokens, T)) for begin in range(0, T, slice_tokens)]
        one: Any = _slice if isinstance(layout, Layout) else _slice_of_part
        known = slice_tokens, tuple(one(layout, begin, end) for begin, end in borders)
        _cut[layout] = known
    return known[1]


def _slice(layout: Layout, begin: int, end: int) -> RowSlice:
    lengths = [stop - start for start, stop in pieces_of(layout, begin, end)]
    bounds = tuple(accumulate(lengths, initial=0))
    reaches = tuple(_reach(look, begin, layout) for look in looks_of(layout, [(begin, end)]))
    return RowSlice(
        begin=begin,
        end=end,
        places=layout.places[begin:end],
        within=part_of(bounds, bounds, device=layout.device, is_causal=True),
        reaches=reaches,
        key_blocks=tuple(block for reach in reaches for block in _blocks(reach, end - begin, layout.device)),
        longest_span=layout.longest_span,
        row=ref(layout),
    )


def _reach(look: Look, begin: int, layout: Layout) -> Reach:
    first = look.query - begin
    return Reach(
        queries=slice(first, first + look.query_bounds[-1]),
        keys=slice(*look.key_span),
        part=part_of(look.query_bounds, look.key_bounds, device=layout.device, is_causal=False),
    )


def _slice_of_part(layout: SlicedLayout, begin: int, end: int) -> RowSlice:
    """The same of a rank's part: keys of its own pieces lie in it, all others are gathered."""
    device, borders = layout.index.device, layout.within.query_bounds
    lengths: list[int] = []
    reaches: list[Reach] = []
    for start, stop in pairwise(borders):
        first, last = max(start, begin), min(stop, end)
        if first >= last:
            continue
        lengths.append(last - first)
        if start < first:
            part = part_of((0, last - first), (0, first - start), device=device, is_causal=False)
            reaches.append(Reach(slice(first - begin, last - begin), slice(start, first), part))
    bounds = tuple(accumulate(lengths, initial=0))
    most = end - begin
    gathered = [cut for reach in layout.reaches for cut in _within(reach, begin, end, device)]
    return RowSlice(
        begin=begin,
        end=end,
        places=layout.places[begin:end],
        within=part_of(bounds, bounds, device=device, is_causal=True),
        reaches=tuple(reaches),
        key_blocks=tuple(block for reach in reaches for block in _blocks(reach, most, device)),
        longest_span=layout.longest_span,
        row=ref(layout),
        gathered=tuple(block for reach in gathered for block in _blocks(reach, most, device)),
    )


def _within(reach: Reach, begin: int, end: int, device: torch.device) -> Iterator[Reach]:
    """The spans of a reach whose queries lie in rows `begin:end`, their rows counted from `begin`."""
    assert isinstance(reach.queries, slice), "Reaches of a rank's part are ranges."
    assert isinstance(reach.keys, slice), "Reaches of a rank's part are ranges."
    for query, query_end, key, key_end in reach.part.spans():
        first = max(reach.queries.start + query, begin)
        last = min(reach.queries.start + query_end, end)
        if first < last:
            yield Reach(
                slice(first - begin, last - begin),
                slice(reach.keys.start + key, reach.keys.start + key_end),
                part_of((0, last - first), (0, key_end - key), device=device, is_causal=False),
            )


def _blocks(reach: Reach, most: int, device: torch.device) -> Iterator[Reach]:
    """`reach` in parts that attend to at most `most` keys each."""
    if reach.part.key_bounds[-1] <= most:
        yield reach
        return
    for query, query_end, key, key_end in reach.part.spans():
        assert isinstance(reach.queries, slice), "Reaches without a window are ranges."
        assert isinstance(reach.keys, slice), "Reaches without a window are ranges."
        queries = slice(reach.queries.start + query, reach.queries.start + query_end)
        for start in range(key, key_end, most):
            num_keys = min(most, key_end - start)
            first = reach.keys.start + start
            bounds = (0, query_end - query), (0, num_keys)
            part = part_of(*bounds, device=device, is_causal=False)
            yield Reach(queries, slice(first, first + num_keys), part)
