"""Rows of a dataset to counts: from tokenized rows in the cache, else tokenized as they are read."""

from __future__ import annotations

import itertools
import os
import re
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memtrain.errors import DataError
from memtrain.recipes.formats.detect import FORMS
from memtrain.recipes.sections.data import Data
from memtrain.trainers.data.length_report.counts import Counting, Counts
from memtrain.trainers.data.length_report.interrupt import Stop, on_interrupt
from memtrain.trainers.data.length_report.result import BadRows, Faulty
from memtrain.trainers.data.length_report.split import Side
from memtrain.trainers.data.sources.readers import Line
from memtrain.trainers.data.sources.splits import HAS_PROMPTS
from memtrain.trainers.data.store.cache import cache_dir
from memtrain.trainers.data.store.prepare import Work, store_folder
from memtrain.trainers.data.store.token_store import META_FILE, TokenStore
from memtrain.trainers.data.tokenize.workers import Tokenized, Tokenizing, batches, tokenized

Ints = NDArray[np.int64]
Progress = Callable[[int, int, int | None], None]
"""Called with (rows read so far, tokens so far, rows there are where that is known)."""

PARALLELISM = "TOKENIZERS_PARALLELISM"
ROWS_OF_BATCH = 256
"""Measured on 2 cores: no slower than 1,000, and two thirds of the memory."""
KINDS_SHOWN = 10
EMPTY = re.compile(r"is empty$|nothing to predict$|holds no messages$")
"""Ends of the sentences that the formats and the tokenization have for rows without content."""
BY_LINES = (".jsonl", ".ndjson")
ROWS_AT_ONCE = 1000
COLUMNS_FILE = "columns.jsonl"


@dataclass(frozen=True, slots=True)
class Read:
    """Result of reading."""

    counts: Counts
    faulty: Faulty
    side: Side
    rows_read: int
    sampled_of: int | None
    is_partial: bool
    is_cached: bool
    unrendered: Mapping[str, int]
    """Rows that hold a field which is in none of their texts, by the field."""


@dataclass(slots=True)
class Faults:
    """Bad rows by kind: the sentence without its numbers and names."""

    streams: list[str]
    kinds: dict[str, BadRows] = field(default_factory=dict)

    def add(self, bad: list[tuple[int, int, str, str]]) -> None:
        """Count the bad rows of a batch."""
        for stream, line, what, fix in bad:
            kind = re.sub(r"'[^']*'|\"[^\"]*\"|\([^)]*\)|0x\w+|\d+", "_", what)
            known = self.kinds.get(kind)
            if known is None:
                known = BadRows(what=what, fix=fix, where=f"{self.streams[stream]}:{line}", rows=0)
            self.kinds[kind] = known.model_copy(update={"rows": known.rows + 1})

    def done(self) -> Faulty:
        """The bad rows in all."""
        kinds = sorted(self.kinds.values(), key=lambda kind: -kind.rows)
        without_loss_tokens = [
            kind for kind in kinds if "no loss token" in kind.what and "the row" in kind.what
        ]
        empty = [kind for kind in kinds if kind not in without_loss_tokens and EMPTY.search(kind.what)]
        return Faulty(
            rows=sum(kind.rows for kind in kinds),
            empty=sum(kind.rows for kind in empty),
            without_loss_tokens=sum(kind.rows for kind in without_loss_tokens),
            kinds=tuple(kinds[:KINDS_SHOWN]),
        )


def read(
    work: Work, data: Data, *, seed: int, sample: int | None = None, progress: Progress | None = None
) -> Read:
    """The counts of all rows, or of a sample of them. Ctrl-C ends the reading, and what was read is reported.

    Raises: DataError when a source cannot be read, or no row can be used.
    """
    store = None if sample else cached_store(work, data, seed)
    with on_interrupt() as stop:
        reading = _Reading(work, seed, stop, progress)
        if store is not None:
            reading.from_store(store)
        else:
            reading.from_rows(sample, data.processes)
    return reading.done(is_cached=store is not None)


def cached_store(work: Work, data: Data, seed: int) -> TokenStore | None:
    """The tokenized rows that a training run left in the cache; None where there are none."""
    if not any((cache_dir(data.cache_dir) / "tokens").glob(f"*/{META_FILE}")):
        return None  # The key needs the digest of every file: not read for nothing.
    made_of = work.made_of(data, seed)
    for skips in (False, True):  # Bad rows are counted here either way.
        folder = store_folder(data, made_of | {"skips": skips})
        if (folder / META_FILE).is_file():
            return TokenStore.open(folder)
    return None


class _Reading:
    """A pass over the rows."""

    def __init__(self, work: Work, seed: int, stop: Stop, progress: Progress | None) -> None:
        self.work, self.seed, self.stop, self.progress = work, seed, stop, progress
        kind = work.job.kind
        self.counting = Counting(FORMS[kind].parts, work.sources, has_prompts=kind in HAS_PROMPTS)
        self.faults = Faults([stream.name for stream in work.streams])
        self.side = Side(work.job)
        self.unrendered: Counter[str] = Counter()
        self.rows_read = 0
        self.sampled_of: int | None = None

    def from_store(self, store: TokenStore) -> None:
        """Count rows that were tokenized before; messages are counted in the rows themselves."""
        self.counting.add_store(store)
        self.unrendered.update(store.meta.unrendered)
        self.rows_read = store.meta.num_read
        if store.meta.num_skipped:
            where, _, what = store.meta.skipped[0].partition(": ")
            kind = BadRows(what=what, fix="", where=where, rows=store.meta.num_skipped)
            self.faults.kinds["cached"] = kind
        if store.meta.has_columns:
            with (store.folder / COLUMNS_FILE).open(encoding="utf-8") as lines:
                while some := list(itertools.islice(lines, ROWS_AT_ONCE)):
                    self.side.columns(some)
        if self.side.wants_rows:
            for stream, line in self.work.rows(self.seed):
                self.side.row(stream, line)

    def from_rows(self, sample: int | None, processes: int) -> None:
        """Tokenize rows and count them, a few batches at a time."""
        rows = self.stop.until(self.work.rows(self.seed))
        if sample is not None:
            chosen, count = reservoir(rows, sample, np.random.default_rng(self.seed))
            rows = iter(chosen)
            self.sampled_of = count if count > len(chosen) else None
        watched = self.side.watched(rows)
        job = self.work.job
        total = None if self.progress is None else sample or rows_there(self.work)
        made = tokenized(watched, job, processes) if processes > 1 else overlapped(watched, Tokenizing(job))
        for batch in made:
            self.counting.add(batch.rows)
            self.side.columns(batch.rows.columns)
            self.faults.add(batch.bad)
            self.unrendered += batch.unrendered
            self.rows_read += batch.num_read
            if self.progress is not None:
                self.progress(self.rows_read, self.counting.tokens_seen, total)

    def done(self, *, is_cached: bool) -> Read:
        counts, faulty = self.counting.done(), self.faults.done()
        if not counts.num_rows:
            raise DataError(*nothing_usable(self.rows_read, faulty, self.work.streams[0].name))
        return Read(
            counts,
            faulty,
            self.side,
            self.rows_read,
            self.sampled_of,
            self.stop.asked,
            is_cached,
            self.unrendered,
        )


def rows_there(work: Work) -> int | None:
    """Rows of all sources, where they can be counted by their line ends; None otherwise."""
    total = 0
    for one in work.found:
        lines = 0
        for stream in one.streams:
            path = Path(stream.name)
            if path.suffix not in BY_LINES or not path.is_file():
                return None
            with path.open("rb") as file:
                lines += sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(2**20), b""))
        total += min(lines, one.source.limit or lines)
    return total


def nothing_usable(rows_read: int, faulty: Faulty, name: str) -> tuple[str, str, str]:
    """(what, where, fix) when no row can be trained on."""
    if not faulty.kinds:
        return "reading was stopped before any row was tokenized", name, "run it again"
    first = faulty.kinds[0]
    return f"all {rows_read:,} rows are bad, most of them like this one: {first.what}", first.where, first.fix


def overlapped(rows: Iterator[tuple[int, Line]], work: Tokenizing) -> Iterator[Tokenized]:
    """The batches of `rows`, tokenized, in their order: whole batches side by side, each on one thread.

    Their texts are made here, in the main thread, where a chat template is held to its time.

    Measured on 2 cores: a tenth less time than one batch at a time on the tokenizer's own threads, which wait
    for each other at the end of every batch, and for Python between two.
    """
    threads = tokenizer_threads()
    waiting: deque[Future[Tokenized]] = deque()
    with one_thread_a_batch(), ThreadPoolExecutor(threads) as pool:
        for batch in batches(rows, ROWS_OF_BATCH):
            waiting.append(pool.submit(work.encoded, work.rendered(batch)))
            if len(waiting) > threads + 1:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def tokenizer_threads() -> int:
    """Threads of the tokenizer: its environment variable, else the cores."""
    if os.environ.get(PARALLELISM, "true").lower() in ("false", "off", "no", "n", "f", "0", ""):
        return 1
    value = os.environ.get("RAYON_NUM_THREADS", "")
    if value.isdecimal() and int(value):
        return int(value)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def one_thread_a_batch() -> Iterator[None]:
    """Inside, the tokenizer starts no threads of its own."""
    before = os.environ.get(PARALLELISM)
    os.environ[PARALLELISM] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[PARALLELISM]
        else:
            os.environ[PARALLELISM] = before


def reservoir(rows: Iterator[Any], size: int, random: np.random.Generator) -> tuple[list[Any], int]:
    """(`size` of the rows, each choice of them equally likely, in their order; how many rows there are).

    One pass, and random numbers only for the rows that are taken.
    Source: Li 1994, doi:10.1145/198429.198435, algorithm L.
    """
    kept = list(enumerate(itertools.islice(rows, size)))
    count = len(kept)
    if count < size:
        return [row for _, row in kept], count
    weight = random.random() ** (1 / size)
    skip = _gap(random, weight)
    for row in rows:
        if skip == 0:
            kept[int(random.integers(size))] = (count, row)
            weight *= random.random() ** (1 / size)
            skip = _gap(random, weight)
        else:
            skip -= 1
        count += 1
    return [row for _, row in sorted(kept, key=lambda one: one[0])], count


def _gap(random: np.random.Generator, weight: float) -> int:
    return int(np.log(random.random()) / np.log1p(-weight))
