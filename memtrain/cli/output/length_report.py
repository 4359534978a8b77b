"""The answer of `memtrain inspect-lengths` on the screen: bars, tables and a sentence, in 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from memtrain.memory.plan.units import count_of, gib
from memtrain.recipes.formats.detect import FORMS
from memtrain.trainers.data.length_report.format import SHOWN, share, short
from memtrain.trainers.data.length_report.result import Bin, Candidate, Distribution, Inspection

MOST_BARS = 18
MARKED = {50.0: "median", 90.0: "90%", 95.0: "95%", 99.0: "99%", 100.0: "all"}
"""Percentiles shown beside the bars: up to here this part of the rows."""
SHOWN_LONGEST = 3

Table = tuple[Sequence[str], Sequence[Sequence[str]]]


def screen_lines(found: Inspection, width: int, *, block: str = "#") -> Iterator[tuple[str, bool]]:
    """(line, whether it is a heading) of everything that is shown; `block` is the letter of bars."""
    if found.counted_by:
        yield from _plain(found.counted_by, width)
        yield "", False
    yield from _plain(_head(found), width)
    yield "", False
    yield from _table(_parts(found), width)
    yield "", False
    row = found.distributions[0]
    what = "prompt with its longer answer" if FORMS[found.format].num_answers == 2 else row.name
    yield f"Rows by their length in tokens ({what})", True
    yield from ((line, False) for line in bar_lines(row, width, block))
    yield "", False
    for sentence in _facts(found):
        yield from _plain(sentence, width)
    for title, table in _tables(found):
        yield "", False
        yield title, True
        yield from _table(table, width)
    for sentence in (_refusal(found), _emptied(found)):
        if sentence is not None:
            yield "", False
            yield from _plain(sentence, width)
    yield "", False
    yield "Recommended", True
    yield from _plain(found.recommendation.reason, width)
    yield "", False
    for line in found.recommendation.recipe.splitlines():
        yield f"    {line}", False
    for note in found.notes:
        yield "", False
        yield from _plain(note, width)


def bar_lines(one: Distribution, width: int, block: str) -> list[str]:
    """A bar for each doubling of the length, or each half of one, with the percentiles that end in it."""
    bars = _coarse(one.bins)
    marks = [_marks(one, bar) for bar in bars]
    labels = [f"{bar.first:,}-{bar.last:,}" if bar.first < bar.last else f"{bar.last:,}" for bar in bars]
    counts = [short(bar.rows) for bar in bars]
    label_size, count_size = max(map(len, labels)), max(map(len, counts))
    room = max(10, width - label_size - count_size - 7 - max(map(len, marks)))
    most = max(bar.rows for bar in bars)
    lines: list[str] = []
    for bar, label, count, mark in zip(bars, labels, counts, marks, strict=True):
        size = max(round(room * bar.rows / most), 1) if bar.rows else 0
        drawn = (block * size).ljust(room) if mark else block * size
        lines.append(f"  {label:>{label_size}}  {count:>{count_size}}  {drawn} {mark}".rstrip())
    return lines


def _coarse(bins: Sequence[Bin]) -> list[Bin]:
    for parts in ((2, 3), (2,)):
        ends = {2**power * part // 2 for power in range(32) for part in parts}
        made: list[Bin] = []
        for one in bins:
            if made and made[-1].last not in ends:
                last = made.pop()
                made.append(Bin(first=last.first, last=one.last, rows=last.rows + one.rows))
            else:
                made.append(one)
        if len(made) <= MOST_BARS:
            return made
    return made


def _marks(one: Distribution, bar: Bin) -> str:
    inside = [
        point
        for point in one.percentiles
        if point.percent in MARKED and bar.first <= point.tokens <= bar.last
    ]
    return ", ".join(f"{MARKED[point.percent]}: {point.tokens:,}" for point in inside[-2:])


def _head(found: Inspection) -> str:
    about = "the first " if found.extent.is_partial else "about " if found.extent.is_estimate else ""
    loss_tokens = f", {found.loss_tokens:,} loss tokens" if found.loss_tokens else ""
    return (
        f"{found.dataset}: {about}{count_of(found.rows, 'row')}, {found.tokens:,} tokens{loss_tokens} "
        f"({found.method}, rows of format {found.format}, tokenizer {found.tokenizer})"
    )


def _parts(found: Inspection) -> Table:
    shown = (50.0, 90.0, 95.0, 99.0)
    rows = [
        (
            SHOWN.get(one.name, one.name) if one.unit == "tokens" else f"{one.name} ({one.unit})",
            short(one.count),
            f"{one.mean:,.1f}" if one.mean < 1e5 else short(one.mean),
            *(_fitting(point.tokens) for point in one.percentiles if point.percent in shown),
            _fitting(one.largest),
            short(one.total),
        )
        for one in found.distributions
    ]
    return ("tokens of", "rows", "mean", *(f"{percent:g}%" for percent in shown), "longest", "total"), rows


def _fitting(tokens: int) -> str:
    """In full as long as eight such columns fit beside each other."""
    return f"{tokens:,}" if tokens < 1e5 else short(tokens)


def _facts(found: Inspection) -> Iterator[str]:
    mean = found.distributions[0]
    if mean.mean_interval is not None:
        low, high = mean.mean_interval
        yield f"Mean length of a row: {mean.mean:,.1f} tokens ({low:,.1f} to {high:,.1f}, 95% confidence)."
    longest = ", ".join(f"{row.where} ({row.tokens:,})" for row in found.longest[:SHOWN_LONGEST])
    yield f"Longest rows: {longest}."
    if found.duplicates:
        again = share(found.duplicates, found.rows)
        yield f"{count_of(found.duplicates, 'row')} ({again}) repeat an earlier one."
    if found.faulty.rows:
        yield found.faulty.words


def _tables(found: Inspection) -> Iterator[tuple[str, Table]]:
    own = found.candidates[0].losses[0].truncation
    other = [loss.truncation for loss in found.candidates[0].losses[1:]]
    what = "loss tokens" if found.loss_tokens else "tokens"
    yield (
        f"Losses of each max_length ({what} lost, by truncation)",
        _lost(found, own, other),
    )
    batches = f"padding in micro-batches of {found.batch.micro_batch_size}"
    step = (
        count_of(found.batch.rows, "row")
        if found.batch.rows is not None
        else f"{found.batch.tokens:,} tokens"
    )
    if found.candidates[0].packings:
        yield f"Costs: {batches}; sequences and fill when packed", _room(found)
        yield f"Optimizer steps of one epoch ({step} a step)", _steps(found)
    else:
        yield (
            f"Costs: {batches}; steps of one epoch ({step} each)",
            _beside(_room(found), _steps(found)),
        )


def _beside(left: Table, right: Table) -> Table:
    """A table of two with the same first column."""
    (left_head, left_rows), (right_head, right_rows) = left, right
    rows = [[*one, *other[1:]] for one, other in zip(left_rows, right_rows, strict=True)]
    return [*left_head, *right_head[1:]], rows


def _refusal(found: Inspection) -> str | None:
    """Reason that the shortest candidate that does not fit is refused."""
    refused = [one for one in found.candidates if one.cost is not None and one.cost.fits is False]
    if not refused or refused[0].cost is None:
        return None
    return f"{refused[0].max_length:,} does not fit: {refused[0].cost.words}."


def _emptied(found: Inspection) -> str | None:
    """The candidates that leave no row to plan, where others are planned."""
    emptied = [f"{one.max_length:,}" for one in found.candidates if one.cost is None]
    if not emptied or len(emptied) == len(found.candidates):
        return None
    return f"At max_length {', '.join(emptied)} no row is left to train on: there is nothing to plan."


def _lost(found: Inspection, own: str, other: Sequence[str]) -> Table:
    def lost(one: Candidate, at: int) -> str:
        loss = one.losses[at]
        pair = (
            (loss.loss_tokens_lost, found.loss_tokens)
            if found.loss_tokens
            else (loss.tokens_lost, found.tokens)
        )
        if at or one.lost_interval is None:
            return share(*pair)
        low, high = one.lost_interval
        return f"{share(*pair)} ±{50 * (high - low):.2g}"

    head = ("max_length", "longer", "cut", "dropped", "tokens lost", own, *other)
    rows = [
        (
            f"{one.max_length:,}",
            share(one.rows_longer, found.rows),
            short(one.losses[0].rows_cut),
            short(one.losses[0].rows_dropped),
            short(one.losses[0].tokens_lost),
            *(lost(one, at) for at in range(len(one.losses))),
        )
        for one in found.candidates
    ]
    return head, rows


def _room(found: Inspection) -> Table:
    names = [packing.packing for packing in found.candidates[0].packings]
    head = ["max_length", "padding", "grouped", "free", *(word for name in names for word in (name, "fill"))]
    rows = [
        [
            f"{one.max_length:,}",
            *(_percent(part) for part in (one.padding.fixed, one.padding.grouped, one.padding.padding_free)),
            *(word for packed in one.packings for word in (short(packed.sequences), _percent(packed.fill))),
        ]
        for one in found.candidates
    ]
    return head, rows


def _percent(part: float) -> str:
    """Five letters at most."""
    return f"{part:.1%}" if part < 0.9995 else "100%"


def _steps(found: Inspection) -> Table:
    names = [packing.packing for packing in found.candidates[0].packings]
    priced = any(one.cost is not None for one in found.candidates)
    head = [
        "max_length",
        "unpacked" if names else "steps",
        *names,
        *(["needs", "s/step", "fits"] if priced else []),
    ]
    rows: list[Sequence[str]] = []
    for one in found.candidates:
        cells = [
            f"{one.max_length:,}",
            f"{one.steps:,}",
            *(f"{packed.steps:,}" for packed in one.packings),
        ]
        if priced:
            cost = one.cost
            needs = gib(cost.need_bytes) if cost is not None and cost.need_bytes is not None else "-"
            seconds = f"{cost.step_s:.3g}" if cost is not None and cost.step_s is not None else "-"
            cells += [needs, seconds, "-" if cost is None else cost.fits_word]
        rows.append(cells)
    return head, rows


def _table(table: Table, width: int) -> Iterator[tuple[str, bool]]:
    """Lines of a table, numbers flush right, the first column flush left where it holds words."""
    head, rows = table
    sizes = [max(len(row[at]) for row in [head, *rows]) for at in range(len(head))]
    gap = 2 if sum(sizes) + 2 * (len(sizes) - 1) <= width else 1
    is_words = any(not row[0][:1].isdigit() for row in rows)
    for number, row in enumerate([head, *rows]):
        cells = [cell.rjust(size) for cell, size in zip(row, sizes, strict=True)]
        if is_words:
            cells[0] = row[0].ljust(sizes[0])
        yield (" " * gap).join(cells).rstrip(), number == 0


def _plain(text: str, width: int) -> Iterator[tuple[str, bool]]:
    return ((line, False) for line in textwrap.wrap(text, width, break_on_hyphens=False))
