"""Sliding windows as calls of kernels that know none: causal squares, squares turned round, and rectangles.

A segment is cut into blocks of the window's length. A block attends to itself causally: no token in it is
out of reach. What its queries see of the tokens before it is a triangle, the nearer keys to more queries:
read from its end to its beginning it is a causal square. Where the keys or the queries are fewer than a
window, a rectangle of full attention lies beside the triangle. Parts are merged by their log-sum-exp.

So every back end that gives the log-sum-exp of its scores has windows, on whole rows and on slices of them.
"""

# T: tokens of the row, w: tokens of the window.

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from memtrain.trainers.model.attention.row_layout import Layout, Part, Rows, part_of


class Reach(NamedTuple):
    """Queries that attend to some keys outside their own part, segment by segment."""

    queries: Rows
    """Rows of the queries."""
    keys: Rows
    """Rows of the keys."""
    part: Part


@dataclass(frozen=True, slots=True)
class Windowed:
    """Pattern of attention inside a window: blocks to themselves, causally, and the reaches between them."""

    within: Part
    reaches: tuple[Reach, ...]


class _Piece(NamedTuple):
    """Rows of queries and keys that meet in one span of a call."""

    query: int
    num_queries: int
    key: int
    num_keys: int


# The same for all layers of one pass with one window; dies with the layout.
_known: WeakKeyDictionary[Layout, dict[tuple[int, int, int], Windowed]] = WeakKeyDictionary()


def pattern_of(layout: Layout, window: int | None) -> Windowed:
    """Pattern of a whole row: segments to themselves, completions to their prompt."""
    if window is not None:
        return windowed(layout, window, 0, layout.num_tokens)
    P, T = layout.num_prompt_tokens, layout.num_tokens  # noqa: N806
    to_prompt = layout.to_prompt
    reaches = () if to_prompt is None else (Reach(slice(P, T), slice(0, P), to_prompt),)
    return Windowed(layout.within, reaches)


def windowed(layout: Layout, window: int, begin: int, end: int) -> Windowed:
    """The pattern of the queries in rows `begin:end` of `layout`, whose rows count from `begin`; keys are
    rows of the whole layout."""
    known = _known.setdefault(layout, {})
    if (window, begin, end) not in known:
        known[window, begin, end] = _windowed(layout, window, begin, end)
    return known[window, begin, end]


def _windowed(layout: Layout, window: int, begin: int, end: int) -> Windowed:
    lengths: list[int] = []
    turned: list[_Piece] = []
    full: list[_Piece] = []
    for start, first, stop in _pieces(layout, begin, end):
        for block in range(first, stop, window):
            num = min(window, stop - block)
            lengths.append(num)
            _edge(turned, full, (block, num), (block, block - start), window)
        prompt = _prompt_of(layout, start)
        if prompt is not None:
            passed = first - start
            _edge(turned, full, (first, stop - first), (prompt[1], prompt[1] - prompt[0]), window - passed)
    bounds = tuple(accumulate(lengths, initial=0))
    most = end - begin
    calls = [(pieces, True) for pieces in _apart(turned)]
    calls += [(pieces, False) for pieces in _apart(_cut(full, most))]
    return Windowed(
        within=part_of(bounds, bounds, device=layout.device, is_causal=True),
        reaches=tuple(_reach(pieces, begin, layout, is_turned=turned) for pieces, turned in calls),
    )


def _pieces(layout: Layout, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
    """(begin of the segment, first row, row after the last) of the segments between two rows."""
    bounds = layout.within.query_bounds
    for number in range(bisect_right(bounds, begin) - 1, len(bounds) - 1):
        if bounds[number] >= end:
            return
        yield bounds[number], max(begin, bounds[number]), min(end, bounds[number + 1])


def _prompt_of(layout: Layout, start: int) -> tuple[int, int] | None:
    """Rows of the prompt of the completion that begins at row `start`; None where it has none."""
    part = layout.to_prompt
    if part is None or start < layout.num_prompt_tokens:
        return None
    group = bisect_right(part.query_bounds, start - layout.num_prompt_tokens) - 1
    return part.key_bounds[group], part.key_bounds[group + 1]


def _edge(
    turned: list[_Piece], full: list[_Piece], queries: tuple[int, int], keys: tuple[int, int], window: int
) -> None:
    """Add what queries (first row, number) see of the keys (row after the last, number) that lie before them.

    `window` tokens, of which those between the last key and the first query are taken off. Query i sees
    keys from `i - shift` on.
    """
    query, num_queries = queries[0], min(queries[1], window - 1)
    num_keys = min(keys[1], window - 1)
    if num_queries <= 0 or num_keys <= 0:
        return
    key = keys[0] - num_keys
    shift = window - 1 - num_keys
    if shift > 0:
        full.append(_Piece(query, min(shift, num_queries), key, num_keys))
    side = num_queries - shift
    if side > 0:
        turned.append(_Piece(query + shift, side, key, side))
        if num_keys > side:
            full.append(_Piece(query + shift, side, key + side, num_keys - side))


def _cut(pieces: Iterable[_Piece], most: int) -> Iterator[_Piece]:
    """Pieces of at most `most` keys each: a kernel makes gradients of keys for every query head before it
    sums them, and the number of keys bounds these."""
    for piece in pieces:
        for key in range(0, piece.num_keys, most):
            yield _Piece(piece.query, piece.num_queries, piece.key + key, min(most, piece.num_keys - key))


def _apart(pieces: Iterable[_Piece]) -> list[list[_Piece]]:
    """Pieces by calls in which no row of a query and no row of a key is met twice."""
    calls: list[list[_Piece]] = []
    for piece in pieces:
        for call in calls:
            last = call[-1]
            if last.query + last.num_queries <= piece.query and last.key + last.num_keys <= piece.key:
                call.append(piece)
                break
        else:
            calls.append([piece])
    return calls


def _reach(pieces: list[_Piece], begin: int, layout: Layout, *, is_turned: bool) -> Reach:
    queries = [(one.query - begin, one.num_queries) for one in pieces]
    keys = [(one.key, one.num_keys) for one in pieces]
    query_bounds, key_bounds = (
        tuple(accumulate((count for _, count in rows), initial=0)) for rows in (queries, keys)
    )
    return Reach(
        _rows(queries, layout, is_turned=is_turned),
        _rows(keys, layout, is_turned=is_turned),
        part_of(query_bounds, key_bounds, device=layout.device, is_causal=is_turned),
    )


def _rows(ranges: list[tuple[int, int]], layout: Layout, *, is_turned: bool) -> Rows:
    """The rows of some (first row, number), each range from its end where it is turned round."""
    if len(ranges) == 1 and not is_turned:
        first, count = ranges[0]
        return slice(first, first + count)
    rows = [torch.arange(first, first + count) for first, count in ranges]
    index: Tensor = torch.cat([one.flip(0) for one in rows] if is_turned else rows)
    return index.to(layout.device, non_blocking=True)
