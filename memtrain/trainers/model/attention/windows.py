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
from collections.abc import Callable, Iterable, Iterator
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


class Piece(NamedTuple):
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
    pieces = list(pieces_between(layout, begin, end))
    edges = Edges()
    for start, first, stop in pieces:
        prompt = prompt_of(layout, start)
        if prompt is not None:
            edges.add((first, stop - first), (prompt[1], prompt[1] - prompt[0]), window - (first - start))
    return inside(pieces, window, begin, end, edges, layout.device)


def inside(
    pieces: Iterable[tuple[int, int, int]],
    window: int,
    begin: int,
    end: int,
    edges: Edges,
    device: torch.device,
) -> Windowed:
    """The pattern of some pieces, each (begin of its segment, first row, row after the last) of rows
    `begin:end`, to themselves and to what lies before them, beside some `edges`."""
    lengths: list[int] = []
    for start, first, stop in pieces:
        for block in range(first, stop, window):
            num = min(window, stop - block)
            lengths.append(num)
            edges.add((block, num), (block, block - start), window)
    bounds = tuple(accumulate(lengths, initial=0))
    within = part_of(bounds, bounds, device=device, is_causal=True)
    return Windowed(within, edges.reaches(begin, end - begin, device))


def pieces_between(layout: Layout, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
    """(begin of the segment, first row, row after the last) of the segments between two rows."""
    bounds = layout.within.query_bounds
    for number in range(bisect_right(bounds, begin) - 1, len(bounds) - 1):
        if bounds[number] >= end:
            return
        yield bounds[number], max(begin, bounds[number]), min(end, bounds[number + 1])


def prompt_of(layout: Layout, start: int) -> tuple[int, int] | None:
    """Rows of the prompt of the completion that begins at row `start`; None where it has none."""
    part = layout.to_prompt
    if part is None or start < layout.num_prompt_tokens:
        return None
    group = bisect_right(part.query_bounds, start - layout.num_prompt_tokens) - 1
    return part.key_bounds[group], part.key_bounds[group + 1]


class Edges:
    """Queries and the keys before them that lie within a window: triangles and rectangles."""

    def __init__(self) -> None:
        self.turned: list[Piece] = []
        """Triangles, read from their ends to their beginnings."""
        self.full: list[Piece] = []
        """Rectangles."""

    def add(self, queries: tuple[int, int], keys: tuple[int, int], window: int) -> None:
        """Add what queries (first row, number) see of the keys (row after the last, number) before them.

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
            self.full.append(Piece(query, min(shift, num_queries), key, num_keys))
        side = num_queries - shift
        if side > 0:
            self.turned.append(Piece(query + shift, side, key, side))
            if num_keys > side:
                self.full.append(Piece(query + shift, side, key + side, num_keys - side))

    def key_spans(self) -> Iterator[tuple[int, int]]:
        """First row of the keys of each piece, and the row after the last."""
        for piece in (*self.turned, *self.full):
            yield piece.key, piece.key + piece.num_keys

    def moved(self, place: Callable[[int], int]) -> Edges:
        """The same with the keys at other rows, as `place` says of each piece's first."""
        made = Edges()
        made.turned, made.full = (
            [piece._replace(key=place(piece.key)) for piece in pieces] for pieces in (self.turned, self.full)
        )
        return made

    def reaches(self, begin: int, most: int, device: torch.device) -> tuple[Reach, ...]:
        """The pieces by calls of a kernel: rows of queries count from `begin`, rectangles have at most `most`
        keys."""
        calls = [(pieces, True) for pieces in _apart(self.turned)]
        calls += [(pieces, False) for pieces in _apart(_cut(self.full, most))]
        return tuple(_reach(pieces, begin, device, is_turned=is_turned) for pieces, is_turned in calls)


def _cut(pieces: Iterable[Piece], most: int) -> Iterator[Piece]:
    """Pieces of at most `most` keys each: a kernel makes gradients of keys for every query head before it
    sums them, and the number of keys bounds these."""
    for piece in pieces:
        for key in range(0, piece.num_keys, most):
            yield Piece(piece.query, piece.num_queries, piece.key + key, min(most, piece.num_keys - key))


def _apart(pieces: Iterable[Piece]) -> list[list[Piece]]:
    """Pieces by calls in which no row of a query and no row of a key is met twice."""
    calls: list[list[Piece]] = []
    for piece in pieces:
        for call in calls:
            last = call[-1]
            if last.query + last.num_queries <= piece.query and last.key + last.num_keys <= piece.key:
                call.append(piece)
                break
        else:
            calls.append([piece])
    return calls


def _reach(pieces: list[Piece], begin: int, device: torch.device, *, is_turned: bool) -> Reach:
    queries = [(one.query - begin, one.num_queries) for one in pieces]
    keys = [(one.key, one.num_keys) for one in pieces]
    query_bounds, key_bounds = (
        tuple(accumulate((count for _, count in rows), initial=0)) for rows in (queries, keys)
    )
    return Reach(
        _rows(queries, device, is_turned=is_turned),
        _rows(keys, device, is_turned=is_turned),
        part_of(query_bounds, key_bounds, device=device, is_causal=is_turned),
    )


def _rows(ranges: list[tuple[int, int]], device: torch.device, *, is_turned: bool) -> Rows:
    """The rows of some (first row, number), each range from its end where it is turned round."""
    if len(ranges) == 1 and not is_turned:
        first, count = ranges[0]
        return slice(first, first + count)
    rows = [torch.arange(first, first + count) for first, count in ranges]
    index: Tensor = torch.cat([one.flip(0) for one in rows] if is_turned else rows)
    return index.to(device, non_blocking=True)
