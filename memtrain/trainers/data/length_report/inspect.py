"""Inspection of a dataset with a tokenizer: the whole answer of `memtrain inspect-lengths`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from memtrain import __version__
from memtrain.memory.plan.units import count_of
from memtrain.memory.rules.ledger import DEFAULT_BATCH_SIZE
from memtrain.recipes.formats.detect import FORMS, METHOD_FORMATS
from memtrain.recipes.sections.data import Data, Format
from memtrain.recipes.sections.length import Length
from memtrain.recipes.sections.training import Train
from memtrain.trainers.data.length_report.candidates import (
    CandidateInputs,
    Price,
    candidates,
    default_candidates,
)
from memtrain.trainers.data.length_report.distribution import distribution
from memtrain.trainers.data.length_report.layouts import PromptRows, RowLayout, row_layout_of
from memtrain.trainers.data.length_report.reader import Progress, Read, read
from memtrain.trainers.data.length_report.recommend import recommend
from memtrain.trainers.data.length_report.result import Batch, Distribution, Extent, Inspection, LongRow
from memtrain.trainers.data.length_report.split import spread_out
from memtrain.trainers.data.sources.splits import choose_rows
from memtrain.trainers.data.store.prepare import Work, work_of
from memtrain.trainers.data.tokenize.unrendered import unrendered_words

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Ints = NDArray[np.int64]
USUAL_MICRO_BATCH_SIZE = 8
"""Rows of a padded micro-batch where the recipe does not say. Taste."""


@dataclass(frozen=True, slots=True)
class Question:
    """The dataset to inspect, and the use of the answer."""

    dataset: str
    """Dataset, as the user named it."""
    data: Data
    length: Length
    train: Train
    method: str | None
    """None: the method that the format of the rows is usually for."""
    tokenizer_name: str
    max_lengths: tuple[int, ...] = ()
    """Candidates; none: some that suit the lengths."""
    sample: int | None = None
    counted_by: str = ""
    """Sentence on a tokenizer that the user did not name."""
    notes: tuple[str, ...] = ()
    """Further remarks."""


def inspect(
    question: Question,
    tokenizer: PreTrainedTokenizerFast,
    *,
    price: Price | None = None,
    progress: Progress | None = None,
) -> Inspection:
    """Read, count, lay out and recommend.

    Raises: DataError when the data cannot be used as declared.
    """
    data, seed = question.data, question.train.seed
    allowed = METHOD_FORMATS[question.method] if question.method else every_format()
    work = work_of(data, data.train, allowed, tokenizer)
    method = question.method or method_of(work.job.kind)
    seen = read(work, data, seed=seed, sample=question.sample, progress=progress)
    chosen = choose_rows(data, seen.counts, seed)
    rows = row_layout_of(method, seen.counts, chosen.train)
    lengths = rows.longest_of_rows
    extent = extent_of(seen)
    batch = batch_of(question.train)
    own = question.length.max_length if "max_length" in question.length.model_fields_set else None
    asked = CandidateInputs(question.length, batch, seed, question.train.shuffle, extent.scale, price)
    tried = sorted(set(question.max_lengths)) or default_candidates(lengths, own)
    table = candidates(rows, tried, asked)
    loss_tokens = 0 if isinstance(rows, PromptRows) else round(int(rows.held_R.sum()) * extent.scale)
    num_rows = round(len(chosen.train) * extent.scale)
    parts = distributions(work, seen, rows, chosen.train, data, extent.scale)
    return Inspection(
        memtrain=__version__,
        dataset=question.dataset,
        method=method,
        format=_format_of(work),
        tokenizer=question.tokenizer_name,
        counted_by=question.counted_by,
        extent=extent,
        rows=num_rows,
        tokens=round(int(seen.counts.lengths[chosen.train].sum()) * extent.scale),
        loss_tokens=loss_tokens,
        duplicates=round((seen.counts.num_rows - len(np.unique(seen.counts.hashes_R))) * extent.scale),
        distributions=parts,
        longest=tuple(
            LongRow(tokens=tokens, where=f"{work.streams[stream].name}:{line}")
            for tokens, stream, line in seen.counts.longest
        ),
        faulty=seen.faulty,
        batch=batch,
        candidates=table,
        recommendation=recommend(
            table,
            rows=num_rows,
            loss_tokens=loss_tokens,
            length=question.length,
            batch=batch,
            answers=[one for one in parts if one.name in seen.side.answers],
            writes_answers=isinstance(rows, PromptRows),
        ),
        notes=(*notes(seen, work, data, extent, len(chosen.eval)), *question.notes),
    )


def _format_of(work: Work) -> str:
    """The format that the rows are written in, where it is one; else that which all are stored in."""
    written = {one.reading.form for one in work.found if FORMS[one.reading.form].stored_as == work.job.kind}
    return written.pop() if len(written) == 1 and len(work.found) == 1 else work.job.kind


def every_format() -> tuple[Format, ...]:
    """Every format, supervised fine-tuning's first: made-up data uses the first."""
    return tuple(dict.fromkeys(form for forms in METHOD_FORMATS.values() for form in forms))


def method_of(kind: str) -> str:
    """The first method whose usual format this is, or that can use it."""
    usual = [method for method, forms in METHOD_FORMATS.items() if forms[0] == kind]
    return next(iter([*usual, *(method for method, forms in METHOD_FORMATS.items() if kind in forms)]))


def extent_of(seen: Read) -> Extent:
    """Rows that were read, and the number that each of them stands for."""
    counts = seen.counts
    scale = counts.num_seen / counts.num_rows
    if seen.sampled_of is not None:
        scale *= seen.sampled_of / seen.rows_read
    return Extent(
        rows_read=seen.rows_read,
        rows_kept=counts.num_rows,
        scale=scale,
        is_partial=seen.is_partial,
        sampled_of=seen.sampled_of,
        is_cached=seen.is_cached,
    )


def batch_of(train: Train) -> Batch:
    """The batch of the recipe; its micro-batch where it says one."""
    rows = train.batch_size if train.batch_tokens is not None else train.batch_size or DEFAULT_BATCH_SIZE
    micro_batch = train.micro_batch_size if train.micro_batch_size != "auto" else USUAL_MICRO_BATCH_SIZE
    return Batch(rows=rows, tokens=train.batch_tokens, micro_batch_size=min(micro_batch, rows or micro_batch))


def distributions(
    work: Work, seen: Read, rows: RowLayout, chosen: Ints, data: Data, scale: float
) -> tuple[Distribution, ...]:
    """Lengths of rows, of their parts and of their loss tokens."""
    counts = seen.counts
    made = [distribution("row", rows.longest_of_rows, scale=scale)]
    parts = FORMS[work.job.kind].parts
    if len(parts) > 1:
        for at, name in enumerate(parts):
            made.append(distribution(name, counts.part_tokens_RP[chosen, at].astype(np.int64), scale=scale))
    if not isinstance(rows, PromptRows):
        times = np.maximum(np.bincount(chosen, minlength=counts.num_rows), 1)
        made.append(distribution("loss_tokens", (rows.held_R // times)[chosen], scale=scale))
    has_turns = work.job.rendering.by_default and len(counts.spans_S2) > counts.num_rows
    if data.assistant_only_loss or has_turns:
        made.append(distribution("turn", np.diff(counts.spans_S2.astype(np.int64))[:, 0], scale=scale))
    if seen.side.wants_rows:
        made.append(distribution("turns", spread_out(seen.side.messages), unit="messages", scale=scale))
    made += [distribution(name, spread_out(found)) for name, found in seen.side.answers.items()]
    return tuple(one for one in made if one.count)


def notes(seen: Read, work: Work, data: Data, extent: Extent, held_out: int) -> tuple[str, ...]:
    """Further remarks that are needed to read the numbers."""
    unrendered = unrendered_words(seen.unrendered, seen.rows_read - seen.faulty.rows)
    notes = [f"Data {note}." for note in (*work.notes, *unrendered)]
    if extent.is_partial:
        notes.append(
            f"Partial: reading was stopped after the first {seen.rows_read:,} rows, which are not a "
            "random sample."
        )
    if extent.sampled_of is not None:
        notes.append(
            f"Estimated from {seen.rows_read:,} of {extent.sampled_of:,} rows, each as likely as any other; "
            "counts are scaled up, intervals hold the true value 95 times in 100. A sample shows fewer "
            "duplicates, and a shorter longest row, than there are."
        )
    if seen.counts.is_thinned:
        notes.append(
            f"The tables are computed from {seen.counts.num_rows:,} of {seen.counts.num_seen:,} rows, "
            "chosen by their hashes, and scaled up, to bound memory."
        )
    if seen.faulty.rows:
        skips = data.on_bad_row == "skip"
        then = "they are left out" if skips else "training stops at the first, unless data.on_bad_row is skip"
        notes.append(f"{count_of(seen.faulty.rows, 'bad row')} not in these numbers: {then}.")
    if held_out:
        notes.append(
            f"Held-out rows (data.eval_fraction) are not counted: {round(held_out * extent.scale):,}."
        )
    if seen.is_cached:
        notes.append("Counted from tokenized rows in the cache; nothing was tokenized.")
    return tuple(notes)
