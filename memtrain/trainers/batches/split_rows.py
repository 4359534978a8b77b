"""Rows of one split as every feed is given them: their store, their epochs, and the plan's settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from memtrain.memory.plan.length_profile import LengthReport
from memtrain.memory.plan.settings import Settings
from memtrain.trainers.data.packing.epochs import laid_epochs
from memtrain.trainers.data.store.token_store import TokenStore
from memtrain.trainers.protocols.events import DataEvent

Ints = NDArray[np.int64]
Laid = TypeVar("Laid")

LENGTH_BINS = 40
"""Bars of the length histogram; taste."""


@dataclass(frozen=True, slots=True)
class SplitRows:
    """The rows of one split."""

    store: TokenStore
    rows: Ints
    settings: Settings
    pad_id: int
    later: Sequence[Ints] = ()
    """Rows of each later epoch, where epochs have rows of their own."""
    num_generations: int = 1
    """Completions that are written for each prompt; 1 where none are."""
    are_sets: bool = False
    """The rows are evaluation sets: `rows` of the first, `later` of the others, reported together."""

    def laid(self, lay: Callable[[Ints], Laid], count: Callable[[Laid], int]) -> tuple[Laid, Ints]:
        """(layout of all epochs, [E + 1] where the sequences of each begin); see `laid_epochs`."""
        return laid_epochs(lay, self.rows, self.later, count, sums_reports=self.are_sets)

    def data_event(self, split: str, report: LengthReport) -> DataEvent:
        """The line of the metrics on truncation and packing of the rows."""
        rows = np.concatenate([self.rows, *self.later]) if self.are_sets else self.rows
        return DataEvent(
            split=split,
            rows=report.num_rows,
            tokens=report.num_tokens,
            loss_tokens=report.num_loss_tokens,
            sequences=report.num_sequences,
            fill=report.fill,
            rows_cut=report.rows_cut,
            rows_dropped=report.rows_dropped,
            tokens_cut=report.tokens_cut,
            loss_tokens_cut=report.loss_tokens_cut,
            loss_tokens_cut_by_answer=report.loss_tokens_cut_by_answer,
            tokens_dropped=report.tokens_dropped,
            loss_tokens_dropped=report.loss_tokens_dropped,
            tokens_idle=report.tokens_idle,
            rows_split=report.rows_split,
            fragments=report.pieces - (report.num_rows - report.rows_dropped - report.rows_split),
            lengths=length_histogram(bounded_lengths(self.store)[rows]),
        )


def bounded_lengths(store: TokenStore) -> Ints:
    """int64 [R]: tokens of each row that length.max_length bounds: of several answers, the longest with its
    prompt."""
    parts = store.part_lengths
    return parts[:, 0] + parts[:, 1:].max(axis=1, initial=0)


def length_histogram(lengths: Ints) -> tuple[tuple[int, int], ...]:
    """(longest length, rows) of bins of equal width."""
    if not len(lengths):
        return ()
    width = max(1, -(-int(lengths.max()) // LENGTH_BINS))
    counts = np.bincount((lengths - 1) // width)
    return tuple(((index + 1) * width, int(count)) for index, count in enumerate(counts))
