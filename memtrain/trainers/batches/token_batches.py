"""Token rows as a feed: the pieces of the store, laid end to end or padded as the plan says."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from memtrain.trainers.batches.collate import MicroBatch, Piece, lay_end_to_end, nothing, pad_right
from memtrain.trainers.batches.split_rows import SplitRows
from memtrain.trainers.data.packing.token_rows import Sequences, Spans, lay_out
from memtrain.trainers.data.store.token_store import TokenStore
from memtrain.trainers.protocols.events import DataEvent

Ints = NDArray[np.int64]


class TokenFeed:
    """Rows of loss tokens (SFT): sequence s weighs its loss tokens."""

    def __init__(self, split: SplitRows) -> None:
        self.split, self.store, self.settings, self.pad_id = split, split.store, split.settings, split.pad_id
        spans, limits = spans_of(self.store), self.settings.row_limits
        self.sequences: Sequences
        self.sequences, self.epoch_ptr = split.laid(
            lambda rows: lay_out(self.store.lengths, spans, rows, limits), len
        )

    @property
    def tokens(self) -> Ints:
        """Tokens of each sequence."""
        return self.sequences.tokens

    @property
    def weights(self) -> Ints:
        """Loss tokens of each sequence."""
        return self.sequences.loss_tokens

    @property
    def loss_tokens(self) -> Ints:
        """Loss tokens of each sequence."""
        return self.sequences.loss_tokens

    def micro_batch(self, sequences: Ints) -> MicroBatch:
        """The sequences' pieces end to end, or one padded row each."""
        is_flat = self.settings.padding_free
        if not len(sequences):
            return nothing(pad_id=self.pad_id, is_flat=is_flat, multiple=self.settings.pad_to_multiple_of)
        pieces = [piece for sequence in sequences for piece in self._pieces(int(sequence))]
        multiple, by_row = self.settings.pad_to_multiple_of, self.settings.positions_by_row
        if is_flat:
            return lay_end_to_end(pieces, pad_id=self.pad_id, multiple=multiple)
        return pad_right(pieces, pad_id=self.pad_id, multiple=multiple, by_row=by_row)

    def sample_prompt(self) -> Tensor:
        """int64 [T], the tokens before the first loss token of the shortest sequence."""
        batch = self.micro_batch(np.array([int(self.tokens.argmin())]))
        end = int(batch.scored_index[0]) + 1 if batch.num_loss_tokens else 1
        return batch.input_ids[0, : max(1, end)]

    def data_event(self, split: str) -> DataEvent:
        """Effects of truncation and packing on the rows."""
        return self.split.data_event(split, self.sequences.profile.report)

    def _pieces(self, sequence: int) -> list[Piece]:
        held = self.sequences
        span = range(int(held.bin_ptr[sequence]), int(held.bin_ptr[sequence + 1]))
        pieces = [self._piece(int(held.row[i]), int(held.start[i]), int(held.length[i])) for i in span]
        if not self.settings.cross_document_attention:
            return pieces
        return [
            Piece(
                np.concatenate([piece.ids for piece in pieces]),
                np.concatenate([piece.loss_mask for piece in pieces]),
            )
        ]

    def _piece(self, row: int, start: int, length: int) -> Piece:
        end = start + length
        return Piece(self.store.row(row)[start:end], self.store.loss_mask(row)[start:end])


def spans_of(store: TokenStore) -> Spans:
    """The loss spans of every row of a store."""
    return Spans(store.span_ptr, store.span_starts, store.span_ends)
