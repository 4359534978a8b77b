"""A rank's slice of a flattened row, and the tokens of other ranks that its queries attend to.

A row of T tokens is cut into 2R chunks of equal length, and rank r of R holds chunks r and 2R - 1 - r: with
causal attention an early chunk is light and a late one heavy, so that every rank has about the same to do.
A slice is attended to in two ways: its own pieces of segments to themselves, and those that began in an
earlier chunk (or answer a prompt) to keys that are gathered from the ranks that hold them. Segments that
begin and end in one chunk need nothing gathered: short documents in a long row cost next to no exchange.

Source: the two chunks are the load balance of Llama 3's context parallelism, arXiv:2407.21783, section 3.3.2,
which gathers keys and values as well.
"""

# T: tokens of the row, L: tokens of the slice, R: ranks, M: tokens whose keys are gathered, C: of them, most
# from one rank.

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from memtrain.trainers.model.attention.row_layout import Layout, Part, part_of
from memtrain.trainers.model.attention.two_part import Reach
from memtrain.trainers.model.context_parallel.groups import ContextRanks

CHUNKS_A_RANK = 2


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class SlicedLayout:
    """Attention pattern for the slice of one rank. Layouts of all ranks are made from the same row.

    index: int64 [L], the rows of the whole row that the slice holds, in order.
    within: the slice's pieces of segments, each to itself, causal.
    reaches: what its queries attend to besides; keys are rows of the M gathered ones.
    sent: int64 [C], rows of the slice whose keys others look back on, filled up with row 0; the first
        `num_sent` count.
    order: int64 [M], where each gathered token is among the R * C that arrive.
    places: int64 [L], the place of each token in its own row.
    longest_span: most tokens that a query can look back on, itself counted.
    whole: who attends to whom in the whole row.
    own_reaches: under a window, what its queries attend to in their own chunk besides; keys are rows of the
        slice.
    """

    ranks: ContextRanks
    index: Tensor
    places: Tensor
    within: Part
    reaches: tuple[Reach, ...]
    sent: Tensor
    num_sent: int
    order: Tensor
    longest_span: int
    whole: Layout
    own_reaches: tuple[Reach, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens of the slice."""
        return self.within.query_bounds[-1]

    @property
    def num_gathered_kv(self) -> int:
        """Tokens whose keys and values are gathered in every layer; the same on all ranks."""
        return len(self.order)


@dataclass(frozen=True, slots=True, eq=False)
class RowPart:
    """The tokens of a row that one rank holds where attention deals out heads: as many as each other's.

    index: int64 [L], their rows in the whole row, in order.
    whole: who attends to whom in it.
    """

    ranks: ContextRanks
    index: Tensor
    whole: Layout

    @property
    def num_tokens(self) -> int:
        """Tokens of this rank."""
        return len(self.index)

    @property
    def places(self) -> Tensor:
        """int64 [L], the place of each token in its own row."""
        return self.whole.places[self.index]

    @property
    def longest_span(self) -> int:
        """Most tokens that a query can look back on, itself counted."""
        return self.whole.longest_span


def part_of_row(layout: Layout, ranks: ContextRanks) -> RowPart:
    """The part of `layout` that this rank holds; the row's length must be a multiple of the ranks."""
    T, size = layout.num_tokens, ranks.size
    assert T % size == 0, f"{T} tokens are not cut into {size} parts."
    own = T // size
    index = torch.arange(ranks.index * own, (ranks.index + 1) * own, device=layout.device)
    return RowPart(ranks, index, layout)


def slice_of(layout: Layout, ranks: ContextRanks) -> SlicedLayout:
    """The slice of `layout` that this rank holds, on the layout's device.

    The row's length must be a multiple of twice the ranks: the plan pads it.
    """
    T, size, device = layout.num_tokens, ranks.size, layout.device
    assert T % (CHUNKS_A_RANK * size) == 0, f"{T} tokens are not cut into {CHUNKS_A_RANK * size} chunks."
    own = held_by(ranks.index, size, T)
    bounds = _bounds([stop - start for piece in own for start, stop in pieces_of(layout, *piece)])
    looks = [list(looks_of(layout, held_by(rank, size, T))) for rank in range(size)]
    gathered = united(look.key_span for of_rank in looks for look in of_rank)
    exchange = exchange_of(gathered, ranks, T, device)
    index = torch.cat([torch.arange(begin, end) for begin, end in own]).to(device)
    return SlicedLayout(
        ranks=ranks,
        index=index,
        places=layout.places[index],
        within=part_of(bounds, bounds, device=device, is_causal=True),
        reaches=tuple(_reach(look, own, gathered, device) for look in looks[ranks.index]),
        sent=exchange.sent,
        num_sent=exchange.num_sent,
        order=exchange.order,
        longest_span=layout.longest_span,
        whole=layout,
    )


def held_by(rank: int, size: int, num_tokens: int) -> tuple[tuple[int, int], ...]:
    """The rows that a rank holds: its two chunks, or one range where they are neighbours."""
    chunk = num_tokens // (CHUNKS_A_RANK * size)
    early, late = rank * chunk, (CHUNKS_A_RANK * size - 1 - rank) * chunk
    if early + chunk == late:
        return ((early, late + chunk),)
    return ((early, early + chunk), (late, late + chunk))


class Look(NamedTuple):
    """Queries from row `query` on that attend to the keys from row `key` on, bounds counted from there."""

    query: int
    query_bounds: tuple[int, ...]
    key: int
    key_bounds: tuple[int, ...]

    @property
    def key_span(self) -> tuple[int, int]:
        """First row of the keys, and the row after the last."""
        return self.key, self.key + self.key_bounds[-1]


def pieces_of(layout: Layout, begin: int, end: int) -> Iterator[tuple[int, int]]:
    """The parts of segments between two rows."""
    bounds = layout.within.query_bounds
    first, last = bisect_right(bounds, begin) - 1, bisect_left(bounds, end)
    for start, stop in pairwise(bounds[first : last + 1]):
        yield max(start, begin), min(stop, end)


def looks_of(layout: Layout, held: Sequence[tuple[int, int]]) -> Iterator[Look]:
    """Keys that the queries of some rows attend to beside their own piece: their segment's beginning, a
    prompt."""
    bounds = layout.within.query_bounds
    for begin, end in held:
        segment = bisect_right(bounds, begin) - 1
        start = bounds[segment]
        if start < begin:
            stop = min(bounds[segment + 1], end)
            yield Look(begin, (0, stop - begin), start, (0, begin - start))
        low, high = max(begin, layout.num_prompt_tokens), end
        if layout.to_prompt is not None and low < high:
            yield _to_prompts(layout.to_prompt, layout.num_prompt_tokens, low, high)


def _to_prompts(part: Part, num_prompt_tokens: int, low: int, high: int) -> Look:
    """Completion tokens between two rows, matched to their groups' prompts."""
    low, high = low - num_prompt_tokens, high - num_prompt_tokens
    first = bisect_right(part.query_bounds, low) - 1
    last = bisect_left(part.query_bounds, high)
    queries = tuple(min(max(bound, low), high) - low for bound in part.query_bounds[first : last + 1])
    start = part.key_bounds[first]
    keys = tuple(bound - start for bound in part.key_bounds[first : last + 1])
    return Look(num_prompt_tokens + low, queries, start, keys)


def united(spans: Iterator[tuple[int, int]]) -> list[tuple[int, int]]:
    """The union of some ranges of rows, as ranges that do not touch."""
    united: list[tuple[int, int]] = []
    for begin, end in sorted(spans):
        if united and begin <= united[-1][1]:
            united[-1] = (united[-1][0], max(end, united[-1][1]))
        else:
            united.append((begin, end))
    return united


class Exchange(NamedTuple):
    """See `SlicedLayout`."""

    sent: Tensor
    num_sent: int
    order: Tensor


def exchange_of(
    gathered: Sequence[tuple[int, int]],
    ranks: ContextRanks,
    T: int,  # noqa: N803
    device: torch.device,
) -> Exchange:
    """Rows that this rank sends, and the place of each gathered token among the arrivals."""
    size = ranks.size
    chunk = T // (CHUNKS_A_RANK * size)
    token_M = np.concatenate([np.arange(0), *(np.arange(begin, end) for begin, end in gathered)])
    chunk_M = token_M // chunk
    is_late_M = chunk_M >= size
    rank_M = np.where(is_late_M, CHUNKS_A_RANK * size - 1 - chunk_M, chunk_M)
    row_M = token_M - chunk_M * chunk + is_late_M * chunk
    sent = [row_M[rank_M == rank] for rank in range(size)]
    most = max((len(rows) for rows in sent), default=0)
    order_M = np.empty_like(token_M)
    for rank, rows in enumerate(sent):
        order_M[rank_M == rank] = rank * most + np.arange(len(rows))
    mine = sent[ranks.index]
    filled = np.concatenate([mine, np.zeros(most - len(mine), mine.dtype)])
    return Exchange(torch.tensor(filled, device=device), len(mine), torch.tensor(order_M, device=device))


def _reach(
    look: Look, own: Sequence[tuple[int, int]], gathered: Sequence[tuple[int, int]], device: torch.device
) -> Reach:
    query, key = place_in(look.query, own), place_in(look.key, gathered)
    return Reach(
        queries=slice(query, query + look.query_bounds[-1]),
        keys=slice(key, key + look.key_bounds[-1]),
        part=part_of(look.query_bounds, look.key_bounds, device=device, is_causal=False),
    )


def place_in(row: int, ranges: Sequence[tuple[int, int]]) -> int:
    """Place of a row when the ranges lie end to end."""
    before = 0
    for begin, end in ranges:
        if begin <= row < end:
            return before + row - begin
        before += end - begin
    raise AssertionError(f"Row {row} is in none of {list(ranges)}.")


def _bounds(lengths: Sequence[int]) -> tuple[int, ...]:
    return tuple(accumulate(lengths, initial=0))
