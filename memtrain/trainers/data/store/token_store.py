"""Tokenized rows on disk: flat, memory-mapped, whole. Truncation and packing are index plans over them.

A store is a folder, written once and never changed:

    tokens.bin      int32   the tokens of all rows, end to end
    part_ptr.bin    int64   [R * P + 1] where each part begins in the tokens; row i has i * P .. (i + 1) * P
    span_ptr.bin    int64   [R + 1] where the loss spans of each row begin in the spans
    spans.bin       int64   [S, 2] first token and end of each loss span, counted in its row
    origin.bin      int64   [R, 2] stream of each row (number into meta.streams), and its line there
    label.bin       float32 [R] label or margin of each row, NaN where it has none (formats that have one)
    columns.jsonl, columns_ptr.bin   other columns of each row, as JSON lines (prompts of online methods)
    sums.bin        uint64  digests of the blocks of all files above, in the order of their names
    meta.json       what made it, its counts, and the digests of sums.bin and of itself; written last

R rows of P parts. A row of a pair is [prompt][chosen][rejected]; the parts are named in the meta. Indices are
compared with their digests when a store is opened, tokens and columns when they are used. No torch here.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memtrain.errors import DataError
from memtrain.recipes.formats.prompt import ASKED
from memtrain.recipes.sections.base import Section
from memtrain.trainers.data.sources.splits import HAS_PROMPTS, Hashes, span_hashes

# Files whose blocks are digested as they are written, and compared when they are first used.
#
# A block is 256 KiB: a row that is read from the disk costs the digest of one block, once. No torch here.


BLOCK_BYTES = 2**18
Bytes = NDArray[np.uint8]
Sums = NDArray[np.uint64]


class SummedFile:
    """A new file, written from its beginning to its end."""

    def __init__(self, path: Path) -> None:
        from xxhash import xxh3_64

        self.path = path
        self.num_bytes = 0
        self._file = path.open("wb")
        self._state, self._filled = xxh3_64(), 0
        self._sums: list[int] = []

    def write(self, data: bytes) -> None:
        """Append bytes."""
        self._file.write(data)
        self.num_bytes += len(data)
        rest = memoryview(data)
        while len(rest):
            some = rest[: BLOCK_BYTES - self._filled]
            self._state.update(some)
            self._filled += len(some)
            rest = rest[len(some) :]
            if self._filled == BLOCK_BYTES:
                self._end_block()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def sums(self) -> Sums:
        """uint64, digest (xxh3) of each block; no more can be written."""
        if self._filled:
            self._end_block()
        return np.array(self._sums, np.uint64)

    def _end_block(self) -> None:
        self._sums.append(self._state.intdigest())
        self._state.reset()
        self._filled = 0


class CheckedFile:
    """A file on disk, memory-mapped, of which each block is compared with its digest before its first use."""

    def __init__(self, path: Path, num_bytes: int, sums: Sums) -> None:
        given = path.stat().st_size if path.is_file() else -1
        if given != num_bytes:
            raise DataError(
                f"'{path.name}' has {given} bytes, not {num_bytes}",
                str(path),
                f"remove '{path.parent}'; it will be made again",
            )
        self.path = path
        # A plain array over the map: a view of the map's own class takes seven times as long to make.
        self._bytes: Bytes = (
            np.asarray(np.memmap(path, np.uint8, "r")) if num_bytes else np.zeros(0, np.uint8)
        )
        self._sums = sums
        self._is_sound = np.zeros(len(sums), np.bool_)

    def whole(self) -> Bytes:
        """All bytes.

        Raises: DataError when they differ from the written bytes.
        """
        return self.part(0, len(self._bytes))

    def part(self, start: int, end: int) -> Bytes:
        """Bytes `start` to `end`, as a view.

        Raises: DataError when they differ from the written bytes.
        """
        first, last = start // BLOCK_BYTES, -(-end // BLOCK_BYTES)
        if not self._is_sound[first:last].all():
            for block in range(first, last):
                self._compare(block)
        return self._bytes[start:end]

    def _compare(self, block: int) -> None:
        from xxhash import xxh3_64_intdigest

        if self._is_sound[block]:
            return
        first = block * BLOCK_BYTES
        given = self._bytes[first : first + BLOCK_BYTES]
        if xxh3_64_intdigest(given.data) != int(self._sums[block]):
            raise DataError(
                f"'{self.path.name}' is damaged: bytes {first:,} to {first + len(given):,} differ from "
                "the written bytes",
                str(self.path),
                f"remove '{self.path.parent}'; it will be made again. Check the disk",
            )
        self._is_sound[block] = True


VERSION = 6
"""Of the layout, and of how files become rows. A store of another version is made again."""
META_FILE = "meta.json"
SUMS_FILE = "sums.bin"

Ids = NDArray[np.int32]
Ints = NDArray[np.int64]


class Stored(Section):
    """The contents of a store, and their origin."""

    version: int
    format: str
    parts: tuple[str, ...]
    """Names of the parts of a row, in their order."""
    streams: tuple[str, ...]
    """Files and datasets the rows are from."""
    sources: tuple[int, ...]
    """Source in the recipe, by number, of each stream."""
    num_rows: int
    num_tokens: int
    num_loss_tokens: int
    """Loss tokens with a token before them: all that count when no row is cut."""
    num_read: int
    """Rows that were read: stored and bad rows. A pair may be stored as two."""
    num_skipped: int
    """Bad rows that were left out."""
    skipped: tuple[str, ...]
    """The first few of them: `file:line: what`."""
    unrendered: dict[str, int]
    """Rows that hold a field which is in none of their texts, by the field."""
    num_empty: int
    """Rows that were read with an empty answer, of which only the end is trained on."""
    first_empty: tuple[int, int] | None
    """(stream, line) of the first of them."""
    num_merged: int
    """Rows where a token reaches over the end of the prompt."""
    first_merged: tuple[int, int, int] | None
    """(stream, line, that token) of the first of them."""
    longest_tokens: int
    has_label: bool
    has_columns: bool
    made_of: dict[str, Any]
    """Tokenizer, template, settings and versions."""
    files: dict[str, int]
    """Bytes of every other file of the store, by its name."""
    sums: str
    """Digest of sums.bin."""
    digest: str = ""
    """Of all other fields."""

    def own_digest(self) -> str:
        """Digest (xxh3, 128 bits) of all fields but `digest`."""
        from xxhash import xxh3_128_hexdigest

        content = json.dumps(self.model_dump(mode="json", exclude={"digest"}), sort_keys=True)
        return xxh3_128_hexdigest(content.encode())


@dataclass(frozen=True, slots=True)
class TokenRow:
    """A row on its way into a store."""

    ids: Ids
    parts: tuple[int, ...]
    """Tokens of each part; they sum to the row."""
    loss_spans: tuple[tuple[int, int], ...]
    """Learnt spans, counted in the row, in order."""
    stream: int
    line: int
    merged: bool = False
    merged_token: int | None = None
    """The token that reaches over the end of the prompt, where it is not the first after it."""
    label: float | None = None
    columns: dict[str, Any] | None = None


@dataclass(slots=True)
class Rows:
    """Rows of a batch as arrays, for other processes and files."""

    ids: Ids
    part_tokens: Ints
    """[R * P] tokens of each part."""
    span_counts: Ints
    spans: Ints
    """[S, 2]"""
    origin: Ints
    """[R, 2]"""
    labels: NDArray[np.float32]
    columns: list[str] = field(default_factory=list)
    num_merged: int = 0
    first_merged: tuple[int, int, int] | None = None
    """(stream, line, token that reaches over the end of the prompt) of the first such row."""


def as_rows(rows: list[TokenRow], num_parts: int) -> Rows:
    """Rows put together."""
    spans = [span for row in rows for span in row.loss_spans]
    columns = [json.dumps(row.columns, ensure_ascii=False) for row in rows if row.columns is not None]
    merged = [
        (row.stream, row.line, int(row.ids[row.parts[0]]) if row.merged_token is None else row.merged_token)
        for row in rows
        if row.merged
    ]
    return Rows(
        ids=np.concatenate([row.ids for row in rows]) if rows else np.zeros(0, np.int32),
        part_tokens=np.array([row.parts for row in rows], np.int64).reshape(len(rows) * num_parts),
        span_counts=np.array([len(row.loss_spans) for row in rows], np.int64),
        spans=np.array(spans, np.int64).reshape(-1, 2),
        origin=np.array([(row.stream, row.line) for row in rows], np.int64).reshape(-1, 2),
        labels=np.array([np.nan if row.label is None else row.label for row in rows], np.float32),
        columns=columns,
        num_merged=len(merged),
        first_merged=merged[0] if merged else None,
    )


class StoreWriter:
    """Appends rows to the files of a store; `finish` writes the parts that need all rows."""

    def __init__(self, folder: Path, *, num_parts: int, has_label: bool, has_columns: bool) -> None:
        self.folder = folder
        self.num_parts = num_parts
        self.has_label, self.has_columns = has_label, has_columns
        names = ["tokens", "spans", "origin", "part_ptr", "span_ptr"]
        names += ["label"] if has_label else []
        names += ["columns_ptr"] if has_columns else []
        self.files = {name: SummedFile(folder / f"{name}.bin") for name in names}
        if has_columns:
            self.files["columns"] = SummedFile(folder / "columns.jsonl")
        self.num_rows = self.num_tokens = self.num_loss_tokens = self.num_merged = 0
        self.num_spans = self.num_column_bytes = self.longest = 0
        self.first_merged: tuple[int, int, int] | None = None
        for name in names:
            if name.endswith("_ptr"):
                self.files[name].write(np.zeros(1, np.int64).tobytes())

    def add(self, rows: Rows) -> None:
        """Append rows."""
        if not len(rows.span_counts):
            return
        self.files["tokens"].write(rows.ids.tobytes())
        self.files["spans"].write(rows.spans.tobytes())
        self.files["origin"].write(rows.origin.tobytes())
        self.files["part_ptr"].write((np.cumsum(rows.part_tokens) + self.num_tokens).tobytes())
        self.files["span_ptr"].write((np.cumsum(rows.span_counts) + self.num_spans).tobytes())
        if self.has_label:
            self.files["label"].write(rows.labels.tobytes())
        if self.has_columns:
            lines = [f"{line}\n".encode() for line in rows.columns]
            sizes = np.cumsum([len(line) for line in lines]) + self.num_column_bytes
            self.files["columns"].write(b"".join(lines))
            self.files["columns_ptr"].write(sizes.astype(np.int64).tobytes())
            self.num_column_bytes = int(sizes[-1])
        self.num_rows += len(rows.span_counts)
        self.num_tokens += len(rows.ids)
        self.num_spans += len(rows.spans)
        self.num_merged += rows.num_merged
        self.first_merged = self.first_merged or rows.first_merged
        self.num_loss_tokens += int(np.subtract(rows.spans[:, 1], np.maximum(rows.spans[:, 0], 1)).sum())
        lengths = rows.part_tokens.reshape(-1, self.num_parts).sum(axis=1)
        self.longest = max(self.longest, int(lengths.max()))

    def finish(self, **fields: Any) -> None:
        """Close the files and write the meta, whose other fields are `said`."""
        from xxhash import xxh3_128_hexdigest

        self.close()
        files = {file.path.name: file for file in self.files.values()}
        sums = np.concatenate([files[name].sums() for name in sorted(files)]).tobytes()
        (self.folder / SUMS_FILE).write_bytes(sums)
        meta = Stored(
            version=VERSION,
            num_rows=self.num_rows,
            num_tokens=self.num_tokens,
            num_loss_tokens=self.num_loss_tokens,
            num_merged=self.num_merged,
            first_merged=self.first_merged,
            longest_tokens=self.longest,
            has_label=self.has_label,
            has_columns=self.has_columns,
            files={name: files[name].num_bytes for name in sorted(files)},
            sums=xxh3_128_hexdigest(sums),
            **fields,
        )
        meta = meta.model_copy(update={"digest": meta.own_digest()})
        (self.folder / META_FILE).write_text(meta.model_dump_json(indent=1) + "\n")

    def close(self) -> None:
        """Close the files."""
        for file in self.files.values():
            file.close()


def checked_files(folder: Path, meta: Stored) -> dict[str, CheckedFile]:
    """Files of a store by their names.

    Raises: DataError when one is missing or of another size, or the digests differ from those that were
    written.
    """
    from xxhash import xxh3_128_hexdigest

    path = folder / SUMS_FILE
    content = path.read_bytes() if path.is_file() else b""
    if xxh3_128_hexdigest(content) != meta.sums:
        raise DataError(
            f"'{path.name}' is damaged: its checksum differs",
            str(path),
            f"remove '{folder}'; it will be made again",
        )
    sums: Sums = np.frombuffer(content, np.uint64)
    files: dict[str, CheckedFile] = {}
    first = 0
    for name, num_bytes in sorted(meta.files.items()):
        num_blocks = -(-num_bytes // BLOCK_BYTES)
        files[name] = CheckedFile(folder / name, num_bytes, sums[first : first + num_blocks])
        first += num_blocks
    return files


class TokenStore:
    """A store, read. Arrays are memory-mapped and read-only."""

    def __init__(self, folder: Path, meta: Stored) -> None:
        self.folder = folder
        self.meta = meta
        self.num_rows, self.num_tokens = meta.num_rows, meta.num_tokens
        self.num_parts = len(meta.parts)
        self._files = checked_files(folder, meta)
        self.part_ptr: Ints = self._map("part_ptr", np.int64, meta.num_rows * self.num_parts + 1)
        self.span_ptr: Ints = self._map("span_ptr", np.int64, meta.num_rows + 1)
        spans = self._map("spans", np.int64, 2 * int(self.span_ptr[-1])).reshape(-1, 2)
        self.span_starts: Ints = spans[:, 0]
        self.span_ends: Ints = spans[:, 1]
        self.origins: Ints = self._map("origin", np.int64, 2 * meta.num_rows).reshape(-1, 2)

    @classmethod
    def open(cls, folder: Path | str) -> TokenStore:
        """The store in a folder.

        Raises: DataError when there is none, or its files are not those it was written with.
        """
        folder = Path(folder)
        path = folder / META_FILE
        if not path.is_file():
            raise DataError(
                f"there are no tokenized rows in '{folder}'",
                str(folder),
                "run the training command again; it tokenizes the rows",
            )
        fix = f"remove '{folder}'; it will be made again"
        try:
            meta = Stored.model_validate_json(path.read_bytes())
        except ValueError:
            raise DataError("these tokenized rows are of another version", str(path), fix) from None
        if meta.digest != meta.own_digest():
            raise DataError(f"'{META_FILE}' is damaged: its checksum differs", str(path), fix)
        return cls(folder, meta)

    def _map(self, name: str, dtype: type, size: int) -> NDArray[Any]:
        """The numbers of an index, all of them compared with their digests."""
        path = self.folder / f"{name}.bin"
        given = self._files[path.name].whole()
        if len(given) != size * np.dtype(dtype).itemsize:
            raise DataError(
                f"'{path.name}' has {len(given)} bytes, not {size * np.dtype(dtype).itemsize}",
                str(path),
                f"remove '{self.folder}'; it will be made again",
            )
        return given.view(dtype)

    def tokens(self, start: int, end: int) -> Ids:
        """int32 view of tokens `start` to `end` of all rows, which lie end to end.

        Raises: DataError when they differ from the written bytes.
        """
        size = np.dtype(np.int32).itemsize
        return self._files["tokens.bin"].part(start * size, end * size).view(np.int32)

    @cached_property
    def row_ptr(self) -> Ints:
        """int64 [R + 1]: where each row begins in `tokens`."""
        return self.part_ptr[:: self.num_parts]

    @cached_property
    def lengths(self) -> Ints:
        """int64 [R]: tokens of each row."""
        return np.diff(self.row_ptr)

    @cached_property
    def loss_tokens_per_row(self) -> Ints:
        """int64 [R]: loss tokens of each row with a token before them: a first one is never predicted."""
        counts = self.span_ends - np.maximum(self.span_starts, 1)
        sums = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
        return sums[self.span_ptr[1:]] - sums[self.span_ptr[:-1]]

    @cached_property
    def part_lengths(self) -> Ints:
        """int64 [R, P]: tokens of each part of each row."""
        return np.diff(self.part_ptr).reshape(-1, self.num_parts)

    @cached_property
    def labels(self) -> NDArray[np.float32]:
        """float32 [R]: verdict (1 or 0) of unpaired rows, margin of pairs; NaN where a row has none."""
        if not self.meta.has_label:
            return np.full(self.num_rows, np.nan, np.float32)
        return self._map("label", np.float32, self.num_rows)

    def row(self, i: int) -> Ids:
        """int32 view of the tokens of row `i`."""
        return self.tokens(int(self.row_ptr[i]), int(self.row_ptr[i + 1]))

    def part(self, i: int, name: str) -> Ids:
        """int32 view of the tokens of one part of row `i`, by its name."""
        at = i * self.num_parts + self.meta.parts.index(name)
        return self.tokens(int(self.part_ptr[at]), int(self.part_ptr[at + 1]))

    def spans(self, i: int) -> list[tuple[int, int]]:
        """Learnt spans of row `i`: first token and end, counted in the row."""
        first, last = self.span_ptr[i], self.span_ptr[i + 1]
        return list(
            zip(self.span_starts[first:last].tolist(), self.span_ends[first:last].tolist(), strict=True)
        )

    def loss_mask(self, i: int) -> NDArray[np.bool_]:
        """bool: which tokens of row `i` are trained on, the first one too where its format learns it."""
        mask = np.zeros(int(self.lengths[i]), np.bool_)
        for start, end in self.spans(i):
            mask[start:end] = True
        return mask

    def origin(self, i: int) -> str:
        """`file:line` of row `i`."""
        stream, line = self.origins[i].tolist()
        return f"{self.meta.streams[stream]}:{line}"

    def columns(self, i: int) -> dict[str, Any]:
        """Other columns of row `i`; none where the format keeps none."""
        return {name: value for name, value in self._kept(i).items() if name != ASKED}

    def asked(self, i: int) -> dict[str, Any] | None:
        """`prompt` and `tools` of row `i` as they were read; None where the format keeps none."""
        return self._kept(i).get(ASKED)

    def _kept(self, i: int) -> dict[str, Any]:
        if not self.meta.has_columns:
            return {}
        start, end = self._columns_ptr[i : i + 2].tolist()
        return json.loads(self._files["columns.jsonl"].part(start, end).tobytes())

    @cached_property
    def _columns_ptr(self) -> Ints:
        return self._map("columns_ptr", np.int64, self.num_rows + 1)

    @property
    def prompts(self) -> Hashes | None:
        """uint64 [R]: hash of the prompt of each row; None for formats whose rows are split one by one."""
        if self.meta.format not in HAS_PROMPTS:
            return None
        return span_hashes(
            self.tokens(0, self.num_tokens), self.row_ptr[:-1], self.part_ptr[1 :: self.num_parts]
        )

    def rows_of_source(self, source: int) -> Ints:
        """Numbers of the rows of one source of the recipe."""
        streams = [stream for stream, own in enumerate(self.meta.sources) if own == source]
        return np.flatnonzero(np.isin(self.origins[:, 0], streams))
