"""Sliding windows over a rank's slice of a row: inside its own chunks, and to tokens that the ranks gather.

A window gathers less than a plain layer does: of what lies before a chunk, no more than a window.
"""

# T: tokens of the row, L: tokens of the slice.

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple
from weakref import WeakKeyDictionary

from memtrain.trainers.model.attention.row_layout import Layout
from memtrain.trainers.model.attention.two_part import (
    Edges,
    Reach,
    Windowed,
    inside,
    pieces_between,
    prompt_of,
)
from memtrain.trainers.model.context_parallel.row_slices import (
    SlicedLayout,
    exchange_of,
    held_by,
    place_in,
    united,
)

Ranges = Sequence[tuple[int, int]]


class Seen(NamedTuple):
    """Keys that some rows of a slice attend to under a window."""

    own: Windowed
    """In their own chunk; keys are rows of the slice."""
    gathered: tuple[Reach, ...]
    """Outside of it; keys are rows of the tokens that are gathered under the window."""


# The same for all layers of one pass with one window; these die with the layout.
_layouts: WeakKeyDictionary[SlicedLayout, dict[int, SlicedLayout]] = WeakKeyDictionary()
_seen: WeakKeyDictionary[SlicedLayout, dict[tuple[int, int, int], Seen]] = WeakKeyDictionary()


def under_window(layout: SlicedLayout, window: int | None) -> SlicedLayout:
    """The layout of a slice where a token attends to `window` tokens, itself counted; None: to all before
    it."""
    if window is None:
        return layout
    known = _layouts.setdefault(layout, {})
    if window not in known:
        known[window] = _under(layout, window)
    return known[window]


def seen_by(layout: SlicedLayout, window: int, begin: int, end: int) -> Seen:
    """Keys that the slice's rows `begin:end` attend to, counted from `begin`; `layout`: without a window."""
    known = _seen.setdefault(layout, {})
    if (window, begin, end) not in known:
        known[window, begin, end] = _seen_by(layout, window, begin, end)
    return known[window, begin, end]


def _under(layout: SlicedLayout, window: int) -> SlicedLayout:
    """Every rank knows what all of them look at, so that no exchange settles what is gathered."""
    exchange = exchange_of(
        _gathered(layout, window), layout.ranks, layout.whole.num_tokens, layout.index.device
    )
    seen = _seen_by(layout, window, 0, layout.num_tokens)
    return replace(
        layout,
        within=seen.own.within,
        own_reaches=seen.own.reaches,
        reaches=seen.gathered,
        sent=exchange.sent,
        num_sent=exchange.num_sent,
        order=exchange.order,
    )


def _seen_by(layout: SlicedLayout, window: int, begin: int, end: int) -> Seen:
    device, ranks, whole = layout.index.device, layout.ranks, layout.whole
    pieces = [
        (start, max(start, begin), min(stop, end))
        for start, stop in pairwise(layout.within.query_bounds)
        if start < end and begin < stop
    ]
    gathered = _gathered(layout, window)
    edges = _edges(whole, held_by(ranks.index, ranks.size, whole.num_tokens), window, begin, end)
    there = edges.moved(lambda row: place_in(row, gathered))
    return Seen(
        inside(pieces, window, begin, end, Edges(), device), there.reaches(begin, end - begin, device)
    )


def _gathered(layout: SlicedLayout, window: int) -> list[tuple[int, int]]:
    """Rows of the whole row that some rank looks at outside its chunks."""
    size, whole = layout.ranks.size, layout.whole

    def spans() -> Iterator[tuple[int, int]]:
        for rank in range(size):
            held = held_by(rank, size, whole.num_tokens)
            yield from _edges(whole, held, window, 0, whole.num_tokens).key_spans()

    return united(spans())


def _edges(layout: Layout, held: Ranges, window: int, begin: int, end: int) -> Edges:
    """Keys that rows `begin:end` of a rank's slice see before their chunk, and of prompts, as rows of the
    whole row."""
    edges, before = Edges(), 0
    for low, high in held:
        for start, first, stop in pieces_between(
            layout, max(low, low + begin - before), min(high, low + end - before)
        ):
            queries, here = (first - low + before, stop - first), max(start, low)
            if start < here:
                edges.add(queries, (here, here - start), window - (first - here))
            prompt = prompt_of(layout, start)
            if prompt is not None:
                edges.add(queries, (prompt[1], prompt[1] - prompt[0]), window - (first - start))
        before += high - low
    return edges
