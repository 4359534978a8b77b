"""Micro-batches: pieces of token rows end to end, or padded on the right, with their targets."""

# B: rows, T: tokens of a row, N: predicted tokens.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from memtrain.trainers.batches.split_rows import SplitRows
from memtrain.trainers.data.packing.token_rows import Sequences, Spans, lay_out
from memtrain.trainers.data.store.token_store import TokenStore
from memtrain.trainers.model.attention.row_layout import Layout, packed_layout
from memtrain.trainers.protocols.events import DataEvent

# Token rows as a feed: the pieces of the store, laid end to end or padded as the plan says.


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


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive tokens of one row, and which of them are trained on."""

    ids: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """Input of a forward pass.

    input_ids, position_ids: int64 [B, T]; B = 1 where rows lie end to end.
    layout: who attends to whom in a flattened row; None for padded rows, where causality is enough: padding
        stands on the right, so no token ever attends to it.
    scored_index: int64 [N], rows of the flattened hidden states [B * T, D] that predict a loss token.
    targets: int64 [N], the loss tokens.
    num_tokens: tokens that are not padding.
    runs_R2: int64 [R, 2], tokens one after another, and of how many rows each of them is one: (number, rows).
        0 rows: padding.
    """

    input_ids: Tensor
    position_ids: Tensor
    layout: Layout | None
    scored_index: Tensor
    targets: Tensor
    num_tokens: int
    runs_R2: Tensor

    @property
    def num_loss_tokens(self) -> int:
        """Tokens that are trained on."""
        return len(self.targets)

    def token_weights(self) -> Tensor:
        """float32 [B * T]: of how many rows each token is one; 0 for padding, several for a shared prompt."""
        count_R, rows_R = self.runs_R2.unbind(1)
        return rows_R.float().repeat_interleave(count_R, output_size=self.input_ids.numel())

    def model_inputs(self) -> dict[str, Any]:
        """The backbone's keyword arguments."""
        inputs: dict[str, Any] = {"input_ids": self.input_ids, "position_ids": self.position_ids}
        return inputs | {"layout": self.layout} if self.layout is not None else inputs

    def to(self, device: torch.device | str) -> MicroBatch:
        """The same micro-batch with its tensors on `device`."""
        ids, index, targets, runs_R2 = (
            tensor.to(device, non_blocking=True)
            for tensor in (self.input_ids, self.scored_index, self.targets, self.runs_R2)
        )
        layout = self.layout.to(device, non_blocking=True) if self.layout is not None else None
        # A layout's positions are the batch's own.
        positions = (
            layout.position_ids if layout is not None else self.position_ids.to(device, non_blocking=True)
        )
        return MicroBatch(ids, positions, layout, index, targets, self.num_tokens, runs_R2)


def lay_end_to_end(pieces: Sequence[Piece], *, pad_id: int, multiple: int | None = None) -> MicroBatch:
    """The pieces as segments of one row, each blind to the others.

    Padding up to a multiple is one segment of its own, so that it costs no attention to anybody.
    """
    ids = np.concatenate([piece.ids for piece in pieces])
    loss_tokens = np.concatenate([piece.loss_mask for piece in pieces])
    lengths = [len(piece) for piece in pieces]
    padding = -len(ids) % multiple if multiple else 0
    if padding:
        ids = np.concatenate([ids, np.full(padding, pad_id, ids.dtype)])
        loss_tokens = np.concatenate([loss_tokens, np.zeros(padding, np.bool_)])
        lengths.append(padding)
    layout = packed_layout(lengths)
    input_T = torch.from_numpy(ids.astype(np.int64))
    # No token predicts the first of a segment.
    loss_tokens[list(layout.within.query_bounds[:-1])] = False
    scored_N = torch.from_numpy(np.flatnonzero(loss_tokens))
    return MicroBatch(
        input_ids=input_T[None],
        position_ids=layout.position_ids,
        layout=layout,
        # Of segments that share no prompt: the token before each.
        scored_index=scored_N - 1,
        targets=input_T[scored_N],
        num_tokens=len(ids) - padding,
        runs_R2=torch.tensor(((len(ids) - padding, 1), (padding, 0))),
    )


def pad_right(
    pieces: Sequence[Piece], *, pad_id: int, multiple: int | None = None, by_row: bool = False
) -> MicroBatch:
    """A micro-batch with a row for each piece, padded on the right to the longest (and up to a multiple).

    `by_row`: positions of padding stay at those of the row's last token, and so tell how long it is.
    """
    width = max(len(piece) for piece in pieces)
    width += -width % multiple if multiple else 0
    ids_BT = np.full((len(pieces), width), pad_id, np.int64)
    is_scored_BT = np.zeros((len(pieces), width), np.bool_)
    for row, piece in enumerate(pieces):
        ids_BT[row, : len(piece)] = piece.ids
        is_scored_BT[row, : len(piece) - 1] = piece.loss_mask[1:]
    index = np.flatnonzero(is_scored_BT)
    position_BT = torch.arange(width)[None].expand(len(pieces), width)
    if by_row:
        last_B1 = torch.tensor([len(piece) - 1 for piece in pieces])[:, None]
        position_BT = torch.minimum(position_BT, last_B1)
    return MicroBatch(
        input_ids=torch.from_numpy(ids_BT),
        position_ids=position_BT,
        layout=None,
        scored_index=torch.from_numpy(index),
        targets=torch.from_numpy(ids_BT.reshape(-1)[index + 1]),
        num_tokens=sum(len(piece) for piece in pieces),
        runs_R2=torch.tensor([run for piece in pieces for run in ((len(piece), 1), (width - len(piece), 0))]),
    )


def nothing(*, pad_id: int, is_flat: bool, multiple: int | None = None) -> MicroBatch:
    """A micro-batch that teaches nothing: for a rank that must take part in a collective."""
    piece = Piece(np.full(2, pad_id, np.int32), np.zeros(2, np.bool_))
    lay = lay_end_to_end if is_flat else pad_right
    made = lay([piece], pad_id=pad_id, multiple=multiple)
    return replace(made, num_tokens=0, runs_R2=torch.tensor(((made.input_ids.numel(), 0),)))
