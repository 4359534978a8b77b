"""Token rows with a teacher's likeliest tokens, where these come from a file."""

# N loss tokens

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from numpy.typing import NDArray

from memtrain.errors import DataError
from memtrain.memory.plan.settings import Settings
from memtrain.trainers.batches.collate import MicroBatch, Piece, TokenFeed, lay_end_to_end, nothing, pad_right
from memtrain.trainers.data.store.top_k import TopKFile, key_of_piece
from memtrain.trainers.losses.distill.teachers import TopKTeacher

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class TaughtBatch(MicroBatch):
    """Rows of a micro-batch, and the teacher's likeliest tokens [N, K] at each loss token."""

    likely: TopKTeacher | None = None
    """None: the teacher is asked."""
    is_written: bool = False
    """The loss tokens are the student's own."""

    def to(self, device: torch.device | str) -> TaughtBatch:
        """The same micro-batch with its tensors on `device`."""
        likely = self.likely
        if likely is not None:
            likely = TopKTeacher(*(one.to(device, non_blocking=True) for one in likely))
        return replace(taught(MicroBatch.to(self, device), likely), is_written=self.is_written)


def taught(rows: MicroBatch, likely: TopKTeacher | None) -> TaughtBatch:
    """Rows with what their teacher says."""
    return TaughtBatch(**{one.name: getattr(rows, one.name) for one in fields(MicroBatch)}, likely=likely)


def batch_of_pieces(
    pieces: Sequence[Piece], settings: Settings, pad_id: int, *, is_written: bool
) -> TaughtBatch:
    """Pieces end to end, or one padded row each, whose teacher is asked."""
    is_flat, multiple = settings.padding_free, settings.pad_to_multiple_of
    if not pieces:
        rows = nothing(pad_id=pad_id, is_flat=is_flat, multiple=multiple)
    elif is_flat:
        rows = lay_end_to_end(pieces, pad_id=pad_id, multiple=multiple)
    else:
        rows = pad_right(pieces, pad_id=pad_id, multiple=multiple, by_row=settings.positions_by_row)
    return replace(taught(rows, None), is_written=is_written)


class TaughtFeed(TokenFeed):
    """Rows of loss tokens, each with what its teacher says."""

    likely: TopKFile | None = None
    """The file of the teacher's likeliest tokens; given before the first step."""

    def micro_batch(self, sequences: Ints) -> TaughtBatch:
        """The sequences' pieces end to end, or one padded row each."""
        rows = TokenFeed.micro_batch(self, sequences)
        if self.likely is None:
            return taught(rows, None)
        return taught(rows, self._likely(self.likely, sequences))

    def piece_of(self, sequence: int) -> Piece:
        """The only piece of a sequence of rows that are not packed."""
        (piece,) = self._pieces(sequence)
        return piece

    def pieces_of(self, sequence: int) -> list[Piece]:
        """The pieces of a sequence, each of which is read by itself."""
        return self._pieces(sequence)

    def check_file(self) -> None:
        """Raise DataError where the file lacks a piece of the rows."""
        for sequence in range(len(self.tokens)):
            self.keys_of(sequence, must_be_in=self.likely)

    def keys_of(self, sequence: int, must_be_in: TopKFile | None = None) -> list[tuple[int, int]]:
        """(key, scored tokens) of each piece of a sequence."""
        found: list[tuple[int, int]] = []
        for piece in self._pieces(sequence):
            key = key_of_piece(piece.ids, piece.loss_mask)
            if must_be_in is not None and must_be_in.piece(key) is None:
                raise DataError(
                    f"a piece of {len(piece):,} tokens is not in the file of the teacher's top-k tokens: "
                    "it was made with other data, another length.max_length or another packing",
                    str(must_be_in.path),
                    "make it again with this recipe: memtrain score-teacher RECIPE",
                )
            found.append((key, int(piece.loss_mask[1:].sum())))
        return found

    def _likely(self, file: TopKFile, sequences: Ints) -> TopKTeacher:
        parts = [
            file.piece(key) for one in sequences.tolist() for key, _ in self.keys_of(one, must_be_in=file)
        ]
        kept = [part for part in parts if part is not None]
        if not kept:
            k = file.facts.top_k
            return TopKTeacher(torch.empty(0, k, dtype=torch.int32), torch.empty(0, k), torch.empty(0))
        ids, logps, tail = (np.concatenate(one) for one in zip(*kept, strict=True))
        return TopKTeacher(torch.from_numpy(ids), torch.from_numpy(logps), torch.from_numpy(tail))
