"""The sequences of a run: rows truncated, split or packed, as an index plan over the tokens and no copy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memtrain.memory.plan.length_profile import NUM_LONGEST, LengthProfile, LengthReport, longest_first
from memtrain.recipes.sections.length import RowLimits
from memtrain.trainers.data.packing.best_fit_decreasing import best_fit_decreasing

Ints = NDArray[np.int64]

SPLITTING = ("bfd_split", "wrapped")
"""Packings that carry a long row on in another sequence instead of cutting it."""


@dataclass(frozen=True, slots=True)
class Spans:
    """Learnt spans of every row: row i has `starts[ptr[i]:ptr[i + 1]]` to `ends[..]`, counted in the row."""

    ptr: Ints
    starts: Ints
    ends: Ints


@dataclass(frozen=True, slots=True)
class Sequences:
    """Sequences of the model: sequence s is the pieces `bin_ptr[s]:bin_ptr[s + 1]`."""

    row: Ints
    """Row of each piece."""
    start: Ints
    """First token of each piece, counted in its row."""
    length: Ints
    """Tokens of each piece."""
    bin_ptr: Ints
    tokens: Ints
    """Tokens of each sequence."""
    loss_tokens: Ints
    """Tokens of each sequence that are trained on: predicted by the token before them, in the same piece."""
    profile: LengthProfile

    def __len__(self) -> int:
        return len(self.tokens)


def lay_out(lengths: Ints, spans: Spans, rows: Ints, length: RowLimits) -> Sequences:
    """Truncate, split and pack `rows` (numbers into `lengths`) as `length` says.

    A pure function: the launcher and every rank make the same. Split rows overlap by one token, which is
    context in the later piece, so that each loss token is still predicted exactly once.
    """
    own = lengths[rows]
    loss_tokens_of_row = count_loss_tokens(spans, rows, np.zeros_like(rows), own)
    if length.packing == "wrapped":
        number, start, kept, bin_ptr, loss_tokens = _wrapped(own, loss_tokens_of_row, spans, rows, length)
        made = (number, start, kept)
    else:
        number, start, kept = pieces_of(own, length)
        loss_tokens = count_loss_tokens(spans, rows[number], start, kept)
        useful = loss_tokens > 0
        number, start, kept, loss_tokens = number[useful], start[useful], kept[useful], loss_tokens[useful]
        made = (number, start, kept)
        order, bin_ptr = _pack(kept, length)
        number, start, kept, loss_tokens = number[order], start[order], kept[order], loss_tokens[order]
    tokens, loss_tokens = _sum_by_bin(kept, bin_ptr), _sum_by_bin(loss_tokens, bin_ptr)
    pieces = tokens if length.cross_document_attention else kept
    return Sequences(
        row=rows[number],
        start=start,
        length=kept,
        bin_ptr=bin_ptr,
        tokens=tokens,
        loss_tokens=loss_tokens,
        profile=LengthProfile(
            report=_report(own, made, loss_tokens_of_row, loss_tokens, length),
            total_tokens=int(tokens.sum()),
            longest=longest_first(_largest(tokens, NUM_LONGEST)),
            most_loss_tokens=longest_first(_largest(loss_tokens, NUM_LONGEST)),
            loss_token_share=highest_share(loss_tokens, tokens),
            longest_piece=int(pieces.max(initial=0)),
            most_pieces=_most_pieces(bin_ptr, length),
            attended_tokens=float((pieces**2).sum() / max(1, pieces.sum())),
        ),
    )


def highest_share(loss_tokens: Ints, tokens: Ints) -> float:
    """The highest share of loss tokens in a sequence; 1 where there is none."""
    return float((loss_tokens / np.maximum(tokens, 1)).max()) if len(tokens) else 1.0


def count_loss_tokens(spans: Spans, row: Ints, start: Ints, length: Ints) -> Ints:
    """Loss tokens of each piece that a token of the same piece predicts: its first token never counts."""
    first, last = spans.ptr[row], spans.ptr[row + 1]
    counts = last - first
    if (counts == 1).all():  # What most rows have: a quarter of the time of the general form.
        begin = np.maximum(spans.starts[first], start + 1)
        return np.maximum(np.minimum(spans.ends[first], start + length) - begin, 0)
    owner = np.repeat(np.arange(len(row)), counts)
    offset = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    index = first[owner] + offset
    begin = np.maximum(spans.starts[index], start[owner] + 1)
    end = np.minimum(spans.ends[index], start[owner] + length[owner])
    return np.bincount(owner, weights=np.maximum(end - begin, 0), minlength=len(row)).astype(np.int64)


def pieces_of(tokens: Ints, length: RowLimits) -> tuple[Ints, Ints, Ints]:
    """(number of the row, start, length) of every piece before packing, for rows of `tokens` tokens."""
    limit = length.max_length
    number, nowhere = np.arange(len(tokens)), np.zeros_like(tokens)
    if limit is None:
        return number, nowhere, tokens
    if length.packing == "bfd_split":
        return _split(tokens, limit)
    kept = np.minimum(tokens, limit)
    if length.truncation == "keep_end":
        return number, tokens - kept, kept
    if length.truncation == "drop":
        fits = tokens <= limit
        return number[fits], nowhere[fits], tokens[fits]
    return number, nowhere, kept


def _split(tokens: Ints, limit: int) -> tuple[Ints, Ints, Ints]:
    """Rows longer than `limit` in pieces of `limit` tokens, each begun with the last of the one before."""
    stride = max(1, limit - 1)
    counts = np.maximum(1, -(-(tokens - 1) // stride))
    number = np.repeat(np.arange(len(tokens)), counts)
    start = (np.arange(len(number)) - np.repeat(np.cumsum(counts) - counts, counts)) * stride
    return number, start, np.minimum(limit, tokens[number] - start)


def _wrapped(
    tokens: Ints, loss_tokens_of_row: Ints, spans: Spans, rows: Ints, length: RowLimits
) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    """(number of the row, start, length) of every piece, bin_ptr, loss tokens of every piece.

    A piece without a loss token stays, so that sequences are full; what is left out, before and after
    the cutting, is whole: a row or a sequence without a loss token.
    """
    assert length.max_length is not None, "The recipe refuses packing without a max_length."
    sees = length.cross_document_attention
    used = np.arange(len(tokens)) if sees else np.flatnonzero(loss_tokens_of_row)
    number, start, kept, begins = _wrap(tokens[used], length.max_length)
    number = used[number]
    bin_ptr = np.append(np.flatnonzero(begins), len(begins))
    loss_tokens = count_loss_tokens(spans, rows[number], start, kept)
    if sees:
        loss_tokens = loss_tokens + _first_loss_tokens(spans, rows[number], start, bin_ptr)
    counts = np.diff(bin_ptr)
    useful = _sum_by_bin(loss_tokens, bin_ptr) > 0
    of_useful = np.repeat(useful, counts)
    bin_ptr = np.concatenate((np.zeros(1, np.int64), np.cumsum(counts[useful])))
    return number[of_useful], start[of_useful], kept[of_useful], bin_ptr, loss_tokens[of_useful]


def _wrap(tokens: Ints, limit: int) -> tuple[Ints, Ints, Ints, NDArray[np.bool_]]:
    """Rows laid end to end and cut every `limit` tokens; a row that goes on repeats its last token.

    (number of the row, start, length, whether it begins a sequence) of every piece.
    """
    stride = max(1, limit - 1)
    rooms = _room_at_each_row(tokens, limit, stride)
    beyond = np.maximum(tokens - rooms, 0)
    counts = 1 + -(-beyond // stride)
    number = np.repeat(np.arange(len(tokens)), counts)
    which = np.arange(len(number)) - np.repeat(np.cumsum(counts) - counts, counts)
    goes_on, room = which > 0, rooms[number]
    start = np.where(goes_on, room - 1 + (which - 1) * stride, 0)
    kept = np.minimum(np.where(goes_on, limit, room), tokens[number] - start)
    return number, start, kept, goes_on | (room == limit)


def _room_at_each_row(tokens: Ints, limit: int, stride: int) -> Ints:
    """Room of the sequence that each row begins in, rows laid end to end.

    The only step that cannot see a row before the one above it: so nothing else is in the loop.
    """
    rooms: list[int] = []
    room = limit
    for total in tokens.tolist():
        if room < 2:  # One token could predict nothing.
            room = limit
        rooms.append(room)
        room = room - total if total <= room else limit - 2 - (total - room - 1) % stride
    return np.array(rooms, np.int64)


def _pack(kept: Ints, length: RowLimits) -> tuple[Ints, Ints]:
    """(order of the pieces, bin_ptr): one piece a sequence, or several."""
    if length.packing == "none" or not len(kept):
        return np.arange(len(kept)), np.arange(len(kept) + 1)
    assert length.max_length is not None, "The recipe refuses packing without a max_length."
    return best_fit_decreasing(kept, length.max_length)


def _first_loss_tokens(spans: Spans, row: Ints, start: Ints, bin_ptr: Ints) -> Ints:
    """1 where a piece's first token is in the loss and the piece before it, in the same sequence, predicts
    it."""
    inner = np.ones(len(row), np.bool_)
    inner[bin_ptr[:-1]] = False
    one = np.ones_like(start)
    return np.where(inner, count_loss_tokens(spans, row, start - 1, one + 1), 0)


def _largest(values: Ints, count: int) -> Ints:
    """The `count` largest values, largest first."""
    if len(values) > count:
        values = np.partition(values, len(values) - count)[-count:]
    return np.sort(values)[::-1]


def _most_pieces(bin_ptr: Ints, length: RowLimits) -> tuple[int, ...]:
    """Pieces of the sequences that have most, where several share one and none attends to another."""
    if length.packing == "none" or length.cross_document_attention:
        return ()
    return longest_first(_largest(np.diff(bin_ptr), NUM_LONGEST))


def _sum_by_bin(values: Ints, bin_ptr: Ints) -> Ints:
    return np.add.reduceat(values, bin_ptr[:-1]) if len(values) else values


def _report(
    tokens: Ints,
    pieces: tuple[Ints, Ints, Ints],
    loss_tokens_of_row: Ints,
    loss_tokens: Ints,
    length: RowLimits,
) -> LengthReport:
    number, start, kept = pieces
    splits, limit = length.packing in SPLITTING, length.max_length or 0
    num_pieces = np.bincount(number, minlength=len(tokens))
    absent = num_pieces == 0
    left_out = int(tokens.sum()) - _distinct_tokens(number, start, kept)
    dropped, loss_tokens_dropped = int(tokens[absent].sum()), int(loss_tokens_of_row[absent].sum())
    num_sequences = len(loss_tokens)
    room = num_sequences * limit if length.packing != "none" else int(kept.sum())
    return LengthReport(
        num_rows=len(tokens),
        num_tokens=int(tokens.sum()),
        num_loss_tokens=int(loss_tokens_of_row.sum()),
        rows_cut=0 if splits or not limit else int((tokens[~absent] > limit).sum()),
        rows_dropped=int(absent.sum()),
        rows_split=int((num_pieces > 1).sum()),
        pieces=len(number),
        tokens_cut=0 if splits else left_out - dropped,
        tokens_dropped=dropped,
        tokens_idle=left_out - dropped if splits else 0,
        loss_tokens_cut=max(0, int(loss_tokens_of_row.sum()) - loss_tokens_dropped - int(loss_tokens.sum())),
        loss_tokens_dropped=loss_tokens_dropped,
        num_sequences=num_sequences,
        fill=int(kept.sum()) / room if room else 1.0,
    )


def _distinct_tokens(row: Ints, start: Ints, kept: Ints) -> int:
    """Tokens in pieces in the order of their rows; tokens shared by two pieces of a row count once."""
    end = start + kept
    shared = np.where(row[1:] == row[:-1], np.maximum(end[:-1] - start[1:], 0), 0)
    return int(kept.sum() - shared.sum())
