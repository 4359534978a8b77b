"""Lengths, loss spans and hashes of rows, gathered batch by batch: numbers of every row, tokens of none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memtrain.trainers.data.packing.token_rows import Spans
from memtrain.trainers.data.sources.splits import Hashes, span_hashes
from memtrain.trainers.data.store.token_store import Rows, TokenStore

Ints = NDArray[np.int64]
Int32s = NDArray[np.int32]
Columns = tuple[Int32s, Int32s, Int32s, Hashes, Int32s, Int32s, Hashes]
"""part_tokens, span_counts, spans, hashes, streams, alike, prompts: see Counts."""

MOST_ROWS = 2_000_000
"""Rows whose numbers are kept one by one. Beyond it, the rows with the smallest hashes stand for all: half of
them, then a quarter, ... Measured: laying out a row takes up to 330 bytes, of a pair 450, for a moment; this
many stay below 1 GiB."""
NUM_LONGEST_SHOWN = 10
ROWS_AT_ONCE = 50_000
"""Rows of a store counted at a time."""


@dataclass(frozen=True, slots=True)
class Counts:
    """Numbers of rows. R rows of P parts, S loss spans."""

    parts: tuple[str, ...]
    part_tokens_RP: Int32s
    span_counts_R: Int32s
    spans_S2: Int32s
    hashes_R: Hashes
    """64-bit hash of the ids of each row: equal rows, equal hashes."""
    stream_R: Int32s
    alike_R: Int32s
    """Tokens that the two answers of a pair both begin with; 0 for rows of other formats."""
    prompts_R: Hashes
    """64-bit hash of the prompt of each row; 0 where it is empty, or rows are split one by one."""
    has_prompts: bool
    """Whether rows of one prompt are held out together."""
    source_of_stream: tuple[int, ...]
    longest: tuple[tuple[int, int, int], ...]
    """(tokens, stream, line) of the longest rows, longest first; of a pair, prompt and longer answer."""
    num_seen: int
    """Rows that were counted; more than R when only some are kept."""
    tokens_seen: int
    loss_tokens_seen: int

    @property
    def num_rows(self) -> int:
        """R: rows that are kept one by one."""
        return len(self.hashes_R)

    @property
    def is_thinned(self) -> bool:
        """Whether there were more rows than are kept."""
        return self.num_seen > self.num_rows

    @property
    def lengths(self) -> Ints:
        """int64 [R]: tokens of each row."""
        return self.part_tokens_RP.sum(axis=1, dtype=np.int64)

    @property
    def spans(self) -> Spans:
        """Learnt spans of each row, as `lay_out` takes them."""
        ptr = np.zeros(self.num_rows + 1, np.int64)
        np.cumsum(self.span_counts_R, out=ptr[1:])
        both = self.spans_S2.astype(np.int64)
        return Spans(ptr, both[:, 0], both[:, 1])

    @property
    def prompts(self) -> Hashes | None:
        """uint64 [R], as `choose_rows` takes them."""
        return self.prompts_R if self.has_prompts else None

    def rows_of_source(self, source: int) -> Ints:
        """Numbers of the rows of one source of the recipe."""
        streams = [stream for stream, own in enumerate(self.source_of_stream) if own == source]
        return np.flatnonzero(np.isin(self.stream_R, streams))


class Counting:
    """Takes batches of tokenized rows and keeps their numbers."""

    def __init__(
        self,
        parts: Sequence[str],
        source_of_stream: Sequence[int],
        most_rows: int = MOST_ROWS,
        *,
        has_prompts: bool = False,
    ) -> None:
        self.parts, self.source_of_stream = tuple(parts), tuple(source_of_stream)
        self.has_prompts = has_prompts
        self.most_rows = most_rows
        self.num_seen = self.tokens_seen = self.loss_tokens_seen = 0
        self._kept: list[Columns] = []
        self._num_kept = 0
        self._below = 2**64
        self._longest: list[tuple[int, int, int]] = []

    def add(self, rows: Rows) -> None:
        """Count the rows of a batch."""
        num_rows = len(rows.span_counts)
        if not num_rows:
            return
        part_tokens = rows.part_tokens.reshape(num_rows, len(self.parts))
        lengths = part_tokens.sum(axis=1)
        is_pair = len(self.parts) == 3
        kept = (
            part_tokens.astype(np.int32),
            rows.span_counts.astype(np.int32),
            rows.spans.astype(np.int32),
            row_hashes(rows.ids, lengths),
            rows.origin[:, 0].astype(np.int32),
            alike_answers(rows.ids, part_tokens) if is_pair else np.zeros(num_rows, np.int32),
            prompt_hashes(rows.ids, part_tokens) if self.has_prompts else np.zeros(num_rows, np.uint64),
        )
        self._kept.append(self._thinned(kept))
        self.num_seen += num_rows
        self.tokens_seen += len(rows.ids)
        self.loss_tokens_seen += int((rows.spans[:, 1] - np.maximum(rows.spans[:, 0], 1)).sum())
        alone = part_tokens[:, 0] + part_tokens[:, 1:].max(axis=1) if is_pair else lengths
        top = np.argsort(-alone, kind="stable")[:NUM_LONGEST_SHOWN]
        longest = [(int(alone[i]), *rows.origin[i].tolist()) for i in top]
        self._longest = sorted(self._longest + longest, key=lambda one: (-one[0], *one[1:]))
        del self._longest[NUM_LONGEST_SHOWN:]
        self._num_kept += len(self._kept[-1][3])
        while self._num_kept > self.most_rows:
            self._below //= 2
            self._kept = [self._thinned(kept) for kept in self._kept]
            self._num_kept = sum(len(kept[3]) for kept in self._kept)

    def add_store(self, store: TokenStore) -> None:
        """Count the rows of a store that was made before."""
        for begin in range(0, store.num_rows, ROWS_AT_ONCE):
            self.add(rows_of_store(store, begin, min(begin + ROWS_AT_ONCE, store.num_rows)))

    def done(self) -> Counts:
        """Counts so far; after this, nothing more can be added."""
        columns: list[NDArray] = []
        empties = (
            np.zeros((0, len(self.parts)), np.int32),
            np.zeros(0, np.int32),
            np.zeros((0, 2), np.int32),
            np.zeros(0, np.uint64),
            np.zeros(0, np.int32),
            np.zeros(0, np.int32),
            np.zeros(0, np.uint64),
        )
        for at, empty in enumerate(empties):
            columns.append(np.concatenate([empty, *(kept[at] for kept in self._kept)]))
        self._kept.clear()
        return Counts(
            self.parts,
            *columns,
            has_prompts=self.has_prompts,
            source_of_stream=self.source_of_stream,
            longest=tuple(self._longest),
            num_seen=self.num_seen,
            tokens_seen=self.tokens_seen,
            loss_tokens_seen=self.loss_tokens_seen,
        )

    def _thinned(self, kept: Columns) -> Columns:
        """The rows with a small enough hash: chance to the lengths, and duplicates stay together."""
        part_tokens, span_counts, spans, hashes, streams, alike, prompts = kept
        if self._below == 2**64:
            return kept
        stays = hashes < np.uint64(self._below)
        return (
            part_tokens[stays],
            span_counts[stays],
            spans[np.repeat(stays, span_counts)],
            hashes[stays],
            streams[stays],
            alike[stays],
            prompts[stays],
        )


def row_hashes(ids: Int32s, lengths: Ints) -> Hashes:
    """uint64 [R]: hash (xxh3) of the ids of each row, which lie end to end in `ids`."""
    ends = np.cumsum(lengths)
    return span_hashes(ids, ends - lengths, ends)


def prompt_hashes(ids: Int32s, part_tokens_RP: Ints) -> Hashes:
    """uint64 [R]: hash of the first part of each row."""
    lengths = part_tokens_RP.sum(axis=1)
    starts = np.cumsum(lengths) - lengths
    return span_hashes(ids, starts, starts + part_tokens_RP[:, 0])


def alike_answers(ids: Int32s, part_tokens_R3: Ints) -> Int32s:
    """int32 [R]: tokens that both answers of each pair begin with: cut to these, they are equal."""
    ends = np.cumsum(part_tokens_R3).reshape(-1, 3)
    first, second = ends[:, 0], ends[:, 1]
    shorter = part_tokens_R3[:, 1:].min(axis=1)
    begin = np.cumsum(shorter) - shorter
    offset = np.arange(int(shorter.sum())) - np.repeat(begin, shorter)
    same = ids[np.repeat(first, shorter) + offset] == ids[np.repeat(second, shorter) + offset]
    differs = np.append(np.flatnonzero(~same), len(same))
    place = differs[np.searchsorted(differs, begin)] - begin
    return np.minimum(place, shorter).astype(np.int32)


def rows_of_store(store: TokenStore, begin: int, end: int) -> Rows:
    """Rows `begin` to `end` of a store, as tokenization gave them."""
    first, last = int(store.span_ptr[begin]), int(store.span_ptr[end])
    parts = store.part_ptr[begin * store.num_parts : end * store.num_parts + 1]
    return Rows(
        ids=store.tokens(int(parts[0]), int(parts[-1])),
        part_tokens=np.diff(parts),
        span_counts=np.diff(store.span_ptr[begin : end + 1]),
        spans=np.stack([store.span_starts[first:last], store.span_ends[first:last]], axis=1),
        origin=np.asarray(store.origins[begin:end]),
        labels=np.zeros(0, np.float32),
    )
