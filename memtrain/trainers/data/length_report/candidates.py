"""Losses and costs of each max_length: rows truncated, padded and packed by the code that training uses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memtrain.recipes.sections.length import Length, other_length
from memtrain.trainers.data.length_report.distribution import ratio_interval, share_interval
from memtrain.trainers.data.length_report.layouts import LaidOut, Padded, RowLayout
from memtrain.trainers.data.length_report.result import (
    Batch,
    Candidate,
    Cost,
    Loss,
    Packing,
    PackingKind,
    Padding,
)
from memtrain.trainers.data.packing.step_order import BatchSize, Epoch, make_epoch

Ints = NDArray[np.int64]
MOST_CANDIDATES = 8

Price = Callable[[Length, RowLayout], Cost | None]
"""Prediction of the planner for these rows, laid out as a `length:` section says."""


@dataclass(frozen=True, slots=True)
class CandidateInputs:
    """Inputs of the counts of the candidates."""

    length: Length
    """The recipe's own section; each candidate replaces its max_length."""
    batch: Batch
    seed: int
    shuffle: bool
    scale: float
    price: Price | None


def default_candidates(lengths: Ints, own: int | None) -> tuple[int, ...]:
    """At most eight: powers of two, and the halves between where there is room, up to a length that cuts
    nothing.

    `own`: the recipe's max_length, always among them.
    """
    longest = int(lengths.max(initial=1))
    typical = int(np.percentile(lengths, 50)) if len(lengths) else 1
    powers = [2**power for power in range(3, 31)]
    last = next(power for power in powers if power >= longest)
    doubled = [power for power in powers if power <= last and (2 * power > typical or power == last)]
    chosen = sorted({*doubled, *(power * 3 // 2 for power in doubled[:-1])})
    if len(chosen) > MOST_CANDIDATES:
        chosen = doubled[-MOST_CANDIDATES:]
    enough = next(at for at, length in enumerate(chosen) if length >= longest)
    chosen = chosen[: enough + 1]
    return tuple(sorted({*chosen, *([own] if own else [])}))


def candidate(rows: RowLayout, max_length: int, asked: CandidateInputs) -> Candidate:
    """A row of the table for one max_length."""
    longest, scale = rows.longest_of_rows, asked.scale
    longer = int((longest > max_length).sum())
    laid = {way: rows.at(other_length(asked.length, max_length, way)) for way in order_of(rows, asked.length)}
    plain = next(iter(laid.values()))
    return Candidate(
        max_length=max_length,
        rows_longer=round(longer * scale),
        longer_interval=share_interval(longer, len(longest), scale),
        losses=tuple(_loss(way, one, scale) for way, one in laid.items()),
        lost_interval=ratio_interval(plain.lost_R, plain.held_R, scale),
        packings=tuple(_packing(rows, max_length, packing, asked) for packing in rows.packings),
        padding=_padding(plain, asked),
        steps=_steps(plain.tokens, asked),
        cost=_cost(rows, max_length, asked),
    )


def order_of(rows: RowLayout, length: Length) -> tuple[str, ...]:
    """The ways to truncate, the recipe's own first."""
    own = length.truncation or rows.truncations[0]
    return (own, *(way for way in rows.truncations if way != own))


def _loss(way: str, laid: LaidOut, scale: float) -> Loss:
    report = laid.report
    return Loss.model_validate(
        {
            "truncation": way,
            "rows_cut": round(report.rows_cut * scale),
            "rows_dropped": round(report.rows_dropped * scale),
            "tokens_lost": round(report.tokens_lost * scale),
            "loss_tokens_lost": round(report.loss_tokens_lost * scale),
        }
    )


def _packing(rows: RowLayout, max_length: int, packing: PackingKind, asked: CandidateInputs) -> Packing:
    truncation = asked.length.truncation if packing == "bfd" else None
    laid = rows.at(other_length(asked.length, max_length, truncation, packing))
    report, scale = laid.report, asked.scale
    return Packing(
        packing=packing,
        sequences=round(report.num_sequences * scale),
        fill=report.fill,
        rows_cut=round(report.rows_cut * scale),
        rows_dropped=round(report.rows_dropped * scale),
        rows_split=round(report.rows_split * scale),
        tokens_lost=round(report.tokens_lost * scale),
        loss_tokens_lost=round(report.loss_tokens_lost * scale),
        steps=_steps(laid.tokens, asked),
    )


def _cost(rows: RowLayout, max_length: int, asked: CandidateInputs) -> Cost | None:
    """Of the recipe's own truncation and packing."""
    if asked.price is None:
        return None
    own = asked.length
    return asked.price(other_length(asked.length, max_length, own.truncation, own.packing), rows)


def _epoch(tokens: Ints, asked: CandidateInputs, *, grouped: bool) -> Epoch:
    size = BatchSize(asked.batch.rows, asked.batch.tokens)
    return make_epoch(tokens, size, seed=asked.seed, epoch=0, shuffle=asked.shuffle, group_by_length=grouped)


def _steps(tokens: Ints, asked: CandidateInputs) -> int:
    """Optimizer steps of one epoch over sequences of `tokens` tokens."""
    if asked.batch.rows is not None:
        return -(-round(len(tokens) * asked.scale) // asked.batch.rows)
    return round(_epoch(tokens, asked, grouped=False).num_steps * asked.scale)


def _padding(laid: LaidOut, asked: CandidateInputs) -> Padding:
    multiple = asked.length.pad_to_multiple_of or 1
    shares = [
        padding_share(
            laid.padded, _epoch(laid.padded.widest_I, asked, grouped=grouped), asked.batch, multiple
        )
        for grouped in (False, True)
    ]
    order = _epoch(laid.tokens, asked, grouped=False)
    flat = flat_share(laid.tokens, order, asked.batch, multiple)
    return Padding(fixed=shares[0], grouped=shares[1], padding_free=flat)


def micro_batch_bounds(step_ptr: Ints, micro_batch_size: int) -> Ints:
    """First item of every micro-batch of at most `micro_batch_size` items; none crosses the end of a step."""
    sizes = np.diff(step_ptr)
    counts = -(-sizes // micro_batch_size)
    which = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.repeat(step_ptr[:-1], counts) + which * micro_batch_size


def padding_share(padded: Padded, epoch: Epoch, batch: Batch, multiple: int) -> float:
    """Positions that are padding, over all positions of an epoch in padded micro-batches."""
    if not len(epoch.order):
        return 0.0
    bounds = micro_batch_bounds(epoch.step_ptr, batch.micro_batch_size)
    widths = np.maximum.reduceat(padded.widest_I[epoch.order], bounds)
    widths += -widths % multiple
    items = np.diff(bounds, append=len(epoch.order))
    return 1 - int(padded.real_I.sum()) / int((widths * items).sum() * padded.slots)


def flat_share(tokens: Ints, epoch: Epoch, batch: Batch, multiple: int) -> float:
    """The same for micro-batches laid end to end."""
    if not len(epoch.order) or multiple == 1:
        return 0.0
    totals = np.add.reduceat(tokens[epoch.order], micro_batch_bounds(epoch.step_ptr, batch.micro_batch_size))
    padding = int((-totals % multiple).sum())
    return padding / (padding + int(tokens.sum()))


def candidates(rows: RowLayout, max_lengths: Sequence[int], asked: CandidateInputs) -> tuple[Candidate, ...]:
    """The table."""
    return tuple(candidate(rows, max_length, asked) for max_length in max_lengths)
