"""The sequences of a run: rows truncated, split or packed, as an index plan over the tokens and no copy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memtrain.memory.lengths import NUM_LONGEST, LengthProfile, LengthReport, longest_first
from memtrain.recipes.length import Length
from memtrain.trainers.data.pack import best_fit_decreasing

Ints = NDArray[np.int64]

SPLITTING = ("bfd_split", "wrapped")
"""Packings that carry a long row on in another sequence instead of cutting it."""


@dataclass(frozen=True, slots=True)
class Spans:
    """Learnt spans of every row: row i has `starts[ptr[i]:ptr[i + 1]]` up to `ends[..]`, counted in the row."""

    ptr: Ints
    starts: Ints
    ends: Ints


@dataclass(frozen=True, slots=True)
class Sequences:
    """What enters the model: sequence s is the pieces `bin_ptr[s]:bin_ptr[s + 1]`."""

    row: Ints
    """Row of each piece."""
    start: Ints
    """First token of each piece, counted in its row."""
    length: Ints
    """Tokens of each piece."""
    bin_ptr: Ints
    tokens: Ints
    """Tokens of each sequence."""
    learnt: Ints
    """Tokens of each sequence that are learnt: predicted by the token before them, in the same piece."""
    profile: LengthProfile

    def __len__(self) -> int:
        return len(self.tokens)


def lay_out(lengths: Ints, spans: Spans, rows: Ints, length: Length) -> Sequences:
    """Truncate, split and pack `rows` (numbers into `lengths`) as the recipe's `length:` section says.

    A pure function: the launcher and every rank make the same. Split rows overlap by one token, which is context
    in the later piece, so that each learnt token is still predicted exactly once.
    """
    row, start, kept = _pieces(lengths[rows], rows, length)
    learnt = count_learnt(spans, row, start, kept)
    total_learnt = int(count_learnt(spans, rows, np.zeros_like(rows), lengths[rows]).sum())
    if not length.documents_see_each_other:
        useful = learnt > 0
        row, start, kept, learnt = row[useful], start[useful], kept[useful], learnt[useful]
    order, bin_ptr = _pack(kept, length)
    row, start, kept, learnt = row[order], start[order], kept[order], learnt[order]
    if length.documents_see_each_other:
        learnt = learnt + _first_tokens_learnt(spans, row, start, bin_ptr)
    tokens, learnt = _sum_by_bin(kept, bin_ptr), _sum_by_bin(learnt, bin_ptr)
    return Sequences(
        row=row,
        start=start,
        length=kept,
        bin_ptr=bin_ptr,
        tokens=tokens,
        learnt=learnt,
        profile=LengthProfile(
            report=_report(lengths, rows, (row, start, kept), total_learnt, learnt, tokens, length),
            total_tokens=int(tokens.sum()),
            longest=longest_first(np.sort(tokens)[::-1][:NUM_LONGEST]),
            longest_piece=int((tokens if length.documents_see_each_other else kept).max(initial=0)),
        ),
    )


def count_learnt(spans: Spans, row: Ints, start: Ints, length: Ints) -> Ints:
    """Learnt tokens of each piece that a token of the same piece predicts: its first token never counts."""
    first, last = spans.ptr[row], spans.ptr[row + 1]
    counts = last - first
    owner = np.repeat(np.arange(len(row)), counts)
    offset = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    index = first[owner] + offset
    begin = np.maximum(spans.starts[index], start[owner] + 1)
    end = np.minimum(spans.ends[index], start[owner] + length[owner])
    return np.bincount(owner, weights=np.maximum(end - begin, 0), minlength=len(row)).astype(np.int64)


def _pieces(tokens: Ints, rows: Ints, length: Length) -> tuple[Ints, Ints, Ints]:
    """(row, start, length) of every piece before packing."""
    limit = length.max_length
    nowhere = np.zeros_like(tokens)
    if limit is None:
        return rows, nowhere, tokens
    if length.packing == "bfd_split":
        return _split(tokens, rows, limit)
    if length.packing == "wrapped":
        return _wrap(tokens, rows, limit)
    kept = np.minimum(tokens, limit)
    if length.truncation == "keep_end":
        return rows, tokens - kept, kept
    if length.truncation == "drop":
        fits = tokens <= limit
        return rows[fits], nowhere[fits], tokens[fits]
    return rows, nowhere, kept


def _split(tokens: Ints, rows: Ints, limit: int) -> tuple[Ints, Ints, Ints]:
    """Rows longer than `limit` in pieces of `limit` tokens, each beginning with the last token of the one before."""
    stride = max(1, limit - 1)
    counts = np.maximum(1, -(-(tokens - 1) // stride))
    owner = np.repeat(np.arange(len(tokens)), counts)
    number = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    start = number * stride
    return rows[owner], start, np.minimum(limit, tokens[owner] - start)


def _wrap(tokens: Ints, rows: Ints, limit: int) -> tuple[Ints, Ints, Ints]:
    """Rows laid end to end and cut every `limit` tokens; a row that goes on begins with its last token again."""
    row: list[int] = []
    start: list[int] = []
    kept: list[int] = []
    room = limit
    for number, total in zip(rows.tolist(), tokens.tolist(), strict=True):
        position = 0
        while True:
            if room < 2:
                room = limit
            take = min(room, total - position)
            row.append(number)
            start.append(position)
            kept.append(take)
            room -= take
            position += take
            if position >= total:
                break
            position -= 1
    return np.array(row, np.int64), np.array(start, np.int64), np.array(kept, np.int64)


def _pack(kept: Ints, length: Length) -> tuple[Ints, Ints]:
    """(order of the pieces, bin_ptr): one piece a sequence, or several."""
    if length.packing == "none" or not len(kept):
        return np.arange(len(kept)), np.arange(len(kept) + 1)
    assert length.max_length is not None, "The recipe refuses packing without a max_length."
    if length.packing == "wrapped":
        return np.arange(len(kept)), _greedy_bins(kept, length.max_length)
    return best_fit_decreasing(kept, length.max_length)


def _greedy_bins(kept: Ints, limit: int) -> Ints:
    """Bins of consecutive pieces, as many as fit."""
    ends = np.cumsum(kept)
    bounds = [0]
    while bounds[-1] < len(kept):
        used = int(ends[bounds[-1] - 1]) if bounds[-1] else 0
        bounds.append(int(np.searchsorted(ends, used + limit, side="right")))
    return np.array(bounds, np.int64)


def _first_tokens_learnt(spans: Spans, row: Ints, start: Ints, bin_ptr: Ints) -> Ints:
    """1 where a piece's first token is learnt and the piece before it, in the same sequence, predicts it."""
    inner = np.ones(len(row), np.bool_)
    inner[bin_ptr[:-1]] = False
    one = np.ones_like(start)
    return np.where(inner, count_learnt(spans, row, start - 1, one + 1), 0)


def _sum_by_bin(values: Ints, bin_ptr: Ints) -> Ints:
    return np.add.reduceat(values, bin_ptr[:-1]) if len(values) else values


def _report(
    lengths: Ints,
    rows: Ints,
    pieces: tuple[Ints, Ints, Ints],
    total_learnt: int,
    learnt: Ints,
    tokens: Ints,
    length: Length,
) -> LengthReport:
    row, start, kept = pieces
    splits = length.packing in SPLITTING
    total, present = int(lengths[rows].sum()), np.unique(row)
    left_out = total - _distinct_tokens(row, start, kept)
    limit = length.max_length or 0
    return LengthReport(
        num_rows=len(rows),
        num_tokens=total,
        num_learnt=total_learnt,
        rows_cut=0 if splits or not limit else int((lengths[present] > limit).sum()),
        rows_dropped=len(rows) - len(present),
        rows_split=int((np.unique(row, return_counts=True)[1] > 1).sum()),
        pieces=len(row),
        tokens_lost=0 if splits else left_out,
        tokens_idle=left_out if splits else 0,
        learnt_lost=total_learnt - int(learnt.sum()),
        num_sequences=len(tokens),
        fill=int(tokens.sum()) / (len(tokens) * limit) if length.packing != "none" and len(tokens) else 1.0,
    )


def _distinct_tokens(row: Ints, start: Ints, kept: Ints) -> int:
    """Tokens in the pieces, those that two pieces of a row share counted once."""
    order = np.lexsort((start, row))
    row, start, end = row[order], start[order], (start + kept)[order]
    shared = np.where(row[1:] == row[:-1], np.maximum(end[:-1] - start[1:], 0), 0)
    return int(kept.sum() - shared.sum())
