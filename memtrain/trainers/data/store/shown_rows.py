"""Encoded rows as people read them: trained text, special tokens, boundaries of packed rows; no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from memtrain.recipes.sections.length import RowLimits
from memtrain.trainers.data.packing.token_rows import Spans, lay_out
from memtrain.trainers.data.store.token_store import TokenStore

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

EXAMPLE_TOKENS = 512
"""Tokens of the row that stands in a report. Taste."""

Ids = NDArray[np.int32]
Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring tokens of one kind, as text."""

    text: str
    is_trained: bool
    is_special: bool


@dataclass(frozen=True, slots=True)
class Piece:
    """A row, or the part of a row that lies in a sequence."""

    name: str
    """Place of the row in its file, and the part of it (prompt, chosen, rejected) where it has several."""
    num_tokens: int
    num_loss_tokens: int
    runs: tuple[Run, ...]


@dataclass(frozen=True, slots=True)
class ShownSequence:
    """A sequence that enters the model: one piece, or several packed together."""

    pieces: tuple[Piece, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens of all pieces."""
        return sum(piece.num_tokens for piece in self.pieces)


def shown_sequences(
    limits: RowLimits | None,
    store: TokenStore,
    rows: NDArray[np.int64],
    tokenizer: PreTrainedTokenizerFast,
    count: int,
) -> list[ShownSequence]:
    """The first `count` sequences of `rows`: packed and truncated by `limits`.

    Without limits (rows with answers, prompts of online methods): whole rows, part by part.
    """
    if limits is None:
        return [ShownSequence(tuple(parts_of(store, int(row), tokenizer))) for row in rows[:count].tolist()]
    spans = Spans(store.span_ptr, store.span_starts, store.span_ends)
    laid = lay_out(store.lengths, spans, rows, limits)
    shown: list[ShownSequence] = []
    for number in range(min(count, len(laid))):
        at = range(int(laid.bin_ptr[number]), int(laid.bin_ptr[number + 1]))
        pieces = (
            piece_of(store, int(laid.row[i]), int(laid.start[i]), int(laid.length[i]), tokenizer) for i in at
        )
        shown.append(ShownSequence(tuple(pieces)))
    return shown


def piece_of(
    store: TokenStore, row: int, start: int, length: int, tokenizer: PreTrainedTokenizerFast
) -> Piece:
    """Tokens `start` to `start + length` of a row; the first token of a piece is predicted by none."""
    ids, mask = store.row(row), store.loss_mask(row)
    own = mask[start : start + length].copy()
    own[:1] = False
    runs = tuple(runs_of(ids[start : start + length], own, tokenizer))
    return Piece(store.origin(row), length, int(own.sum()), runs)


def parts_of(store: TokenStore, row: int, tokenizer: PreTrainedTokenizerFast) -> Iterator[Piece]:
    """The parts of a row that has answers, or of a prompt alone."""
    mask, end = store.loss_mask(row), 0
    label = store.labels[row] if store.meta.has_label and store.num_parts == 2 else np.nan
    for name, length in zip(store.meta.parts, store.part_lengths[row].tolist(), strict=True):
        start, end = end, end + length
        own = mask[start:end]
        verdict = "" if np.isnan(label) or name == "prompt" else ", desirable" if label else ", undesirable"
        runs = tuple(runs_of(store.row(row)[start:end], own, tokenizer))
        yield Piece(f"{store.origin(row)}, {name}{verdict}", length, int(own.sum()), runs)


def example_of(
    store: TokenStore, row: int, tokenizer: PreTrainedTokenizerFast
) -> tuple[tuple[str, bool], ...]:
    """Text of a row in runs, and whether each is trained; of a long row its first EXAMPLE_TOKENS.

    Of a pair each answer stands below its name.
    """
    count = min(int(store.lengths[row]), EXAMPLE_TOKENS)
    ids, mask = store.row(row)[:count], store.loss_mask(row)[:count]
    parts = [("", count)]
    if "rejected" in store.meta.parts:
        parts = list(zip(store.meta.parts, store.part_lengths[row].tolist(), strict=True))
    made: list[tuple[str, bool]] = []
    end = 0
    for name, length in parts:
        start, end = end, min(end + length, count)
        if name not in ("", "prompt") and start < end:
            made.append((f"\n--- {name} ---\n", False))
        merged = groupby(runs_of(ids[start:end], mask[start:end], tokenizer), key=lambda run: run.is_trained)
        made += [("".join(run.text for run in group), is_trained) for is_trained, group in merged]
    return (*made, (" ...", False)) if count < store.lengths[row] else tuple(made)


def runs_of(ids: Ids, mask: Mask, tokenizer: PreTrainedTokenizerFast) -> Iterator[Run]:
    """Tokens in runs of one kind. A character of several tokens stands where its last one is."""
    special = np.isin(ids, tokenizer.all_special_ids)
    kinds = list(zip(mask.tolist(), special.tolist(), strict=True))
    end, before = 0, ""
    for (is_trained, is_special), group in groupby(kinds):
        end += sum(1 for _ in group)
        # Decoded from the start each time: a tokenizer may put or drop a space at the begin of a text.
        whole = str(tokenizer.decode(ids[:end].tolist(), clean_up_tokenization_spaces=False))
        is_last = end == len(ids)
        shown = whole if is_last else whole.rstrip("\ufffd")
        yield Run(shown[len(before) :], is_trained, is_special)
        before = shown
