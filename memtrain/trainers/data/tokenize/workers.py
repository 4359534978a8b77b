"""Rows of a source to tokenized rows: read, render, tokenize once, batch by batch, in one or more processes.

No torch here. Memory is bounded by the batch, not by the data.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from memtrain.errors import DataError
from memtrain.recipes.formats import unpaired
from memtrain.recipes.formats.detect import FORMS, used_columns
from memtrain.recipes.formats.empty_answers import has_empty_answer
from memtrain.recipes.formats.fields import BadRow, Example, Names, Row
from memtrain.recipes.formats.ids import Ids
from memtrain.recipes.formats.media import refuse_media
from memtrain.recipes.formats.preference import Preference
from memtrain.recipes.formats.prompt import Prompt, of_answered, text_of
from memtrain.recipes.formats.prompt_completion import PromptCompletion
from memtrain.recipes.formats.prompt_format import formatted
from memtrain.recipes.formats.string_turns import as_turns
from memtrain.recipes.formats.system_prompt import with_system
from memtrain.recipes.formats.unpaired import Unpaired
from memtrain.trainers.data.sources.readers import Line
from memtrain.trainers.data.store.token_store import Rows, TokenRow, as_rows
from memtrain.trainers.data.tokenize.encode import CHARS_AT_ONCE, Encoded, Encoder
from memtrain.trainers.data.tokenize.plain_rows import (
    MOST_ROW_CHARS,
    PlainTexts,
    columns_of,
    plain_rows,
    plain_texts,
)
from memtrain.trainers.data.tokenize.render import Piece, Rendering, render, texts_alone
from memtrain.trainers.data.tokenize.unrendered import unrendered_fields, unused_columns

ROWS_AT_ONCE = 1000


@dataclass(frozen=True, slots=True)
class Reading:
    """Form and names of one source's rows."""

    form: str
    names: Names
    template_kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Arguments of the chat template for all rows of the source."""
    is_chat: bool = False
    """Whether the chat template renders its first row."""
    system_prompt: str | None = None
    """System message of the conversations that have none of their own."""
    strings_are: str | None = None
    """What the recipe says of strings: `turns`, `text`, or nothing."""
    prompt_format: Mapping[str, str] | None = None
    """Texts that write the prompts of instructions and questions, in place of the chat template."""

    def example(self, row: Row, kind: str = "") -> Example:
        """A row, read; of `kind` prompt, of a question and its answer the question. Raises: BadRow."""
        if self.prompt_format is not None:
            example: Example = formatted(row, self.names, self.form, self.prompt_format)
        else:
            example = FORMS[self.form].parse(row, self.names)
        if self.strings_are == "turns":
            example = as_turns(example, row, self.names)
        example = with_system(example, self.system_prompt)
        if kind == "prompt" and isinstance(example, PromptCompletion):
            return of_answered(example, row, self.names)
        return example


@dataclass(frozen=True, slots=True)
class Job:
    """All that decides which tokens the rows become; travels to the processes that tokenize."""

    tokenizer_json: str
    rendering: Rendering
    kind: str
    """Format of the stored rows; a pair read for a method of single answers becomes two rows."""
    readings: tuple[Reading, ...]
    """By number of the stream."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows as they were read."""

    streams: list[int]
    lines: list[Line]


@dataclass(frozen=True, slots=True)
class Tokenized:
    """A batch, tokenized, and its bad rows: (stream, line, fault, fix)."""

    rows: Rows
    bad: list[tuple[int, int, str, str]]
    num_read: int
    unrendered: Counter[str] = field(default_factory=Counter[str])
    """Rows that hold a field which is in none of their texts, by the field."""
    empty: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """(stream, line) of the rows with an answer that says nothing."""


@dataclass(slots=True)
class Rendered:
    """A batch as texts."""

    batch: Batch
    pieces: list[Piece] = field(default_factory=list[Piece])
    examples: list[tuple[int, Example, int]] = field(default_factory=list[tuple[int, Example, int]])
    """(place of the row in the batch, its example, how many of the texts are that one's)."""
    bad: dict[int, BadRow] = field(default_factory=dict[int, BadRow])
    plain: PlainTexts | None = None
    """The texts where all rows are plain; all else is empty then."""
    empty: set[int] = field(default_factory=set[int])
    """Places of the rows with an answer that says nothing."""
    unused: list[set[str]] = field(init=False)
    """Fields that are in no text, by the place of the row."""

    def __post_init__(self) -> None:
        self.unused = [set() for _ in self.batch.lines]


class Tokenizing:
    """The work of one process."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.parts = FORMS[job.kind].parts
        self.encoder = Encoder(job.tokenizer_json)
        self.columns = [
            columns_of(one.form, one.names, job.kind, job.rendering)
            if self.encoder.cuts_by_bytes and one.system_prompt is None and one.strings_are != "turns"
            else None
            for one in job.readings
        ]
        """Columns of plain rows, by number of the stream."""

    def __call__(self, batch: Batch) -> Tokenized:
        """Tokenize a batch. A row of which one example is bad is left out whole."""
        return self.encoded(self.rendered(batch))

    def rendered(self, batch: Batch) -> Rendered:
        """The texts of a batch, made in a main thread: elsewhere a chat template has no limit of time."""
        plain = plain_texts(batch.streams, batch.lines, self.columns, self.job.rendering.end_token)
        return Rendered(batch, plain=plain) if plain is not None else self._row_by_row(batch)

    def _row_by_row(self, batch: Batch) -> Rendered:
        made = Rendered(batch)
        for at, (stream, (_, row)) in enumerate(zip(batch.streams, batch.lines, strict=True)):
            reading, kind = self.job.readings[stream], self.job.kind
            try:
                if isinstance(row, BadRow):
                    raise row
                refuse_media(row, used_columns(reading.form, reading.names))
                example = reading.example(row, kind)
                unused = unused_columns(row, example, reading.form, reading.names, kind)
                if has_empty_answer(example):
                    made.empty.add(at)
                for one in self._as_kind(example):
                    self._render(made, at, one)
                made.unused[at].update(unused)
            except BadRow as wrong:
                made.bad[at] = wrong
        return made

    def encoded(self, made: Rendered) -> Tokenized:
        """The tokens of a batch's texts, in any thread."""
        batch = made.batch
        places = [(stream, line) for stream, (line, _) in zip(batch.streams, batch.lines, strict=True)]
        if made.plain is not None:
            rows = plain_rows(self.encoder, made.plain, places, len(self.parts))
            if rows is not None:
                empty = [places[at] for at in made.plain.empty]
                return Tokenized(rows, [], len(batch.lines), made.plain.unused, empty)
            made = self._row_by_row(batch)
        encoded = deque(self.encoder.encode(made.pieces))
        kept_rows: list[tuple[int, TokenRow]] = []
        for at, example, num_pieces in made.examples:
            own = [encoded.popleft() for _ in range(num_pieces)]
            try:
                kept_rows.append((at, self._row(example, own, *places[at])))
            except BadRow as wrong:
                made.bad[at] = wrong
        kept = [row for at, row in kept_rows if at not in made.bad]
        bad = [(*places[at], wrong.what, wrong.fix) for at, wrong in sorted(made.bad.items())]
        counts = Counter(name for at, names in enumerate(made.unused) if at not in made.bad for name in names)
        empty = [places[at] for at in sorted(made.empty) if at not in made.bad]
        return Tokenized(as_rows(kept, len(self.parts)), bad, len(batch.lines), counts, empty)

    def _as_kind(self, example: Example) -> tuple[Example, ...]:
        if isinstance(example, Preference) and FORMS[self.job.kind].num_answers == 1:
            return unpaired.from_pair(example)
        return (example,)

    def _render(self, made: Rendered, at: int, example: Example) -> None:
        """Add the texts of an example of row `at`, and the fields of it that are in none of them.

        Raises: BadRow.
        """
        rendering = self._rendering(made.batch.streams[at], example)
        own = () if isinstance(example, Ids) else render(example, rendering)
        for piece in own:
            text_of(piece.text)
            check_chars(piece.text)
        again = partial(texts_alone, rendering=rendering)
        made.unused[at].update(unrendered_fields(example, [piece.text for piece in own], again))
        made.pieces += own
        made.examples.append((at, example, len(own)))

    def _rendering(self, stream: int, example: Example) -> Rendering:
        """Rendering of the example, with its own arguments above its source's."""
        given = {**self.job.readings[stream].template_kwargs, **example.template_kwargs}
        return replace(self.job.rendering, template_kwargs=given) if given else self.job.rendering

    def _row(self, example: Example, own: list[Encoded], stream: int, line: int) -> TokenRow:
        if isinstance(example, Ids):
            return row_of_ids(example, self.encoder.num_tokens, stream, line)
        if isinstance(example, Preference):
            return row_of_pair(own[0], own[1], example.margin, stream, line)
        one = own[0]
        if isinstance(example, Prompt):
            return TokenRow(one.ids, (len(one.ids),), (), stream, line, columns=example.kept)
        check_loss_spans(one.loss_spans, len(one.ids), self.job.rendering)
        cut = one.cut
        parts = (cut, len(one.ids) - cut) if len(self.parts) == 2 else (len(one.ids),)
        label = float(example.label) if isinstance(example, Unpaired) else None
        return TokenRow(one.ids, parts, one.loss_spans, stream, line, merged=one.merged, label=label)


def check_chars(text: str) -> None:
    """Raise BadRow for a text that is tokenized in no reasonable time and memory, and that no model reads."""
    if len(text) > MOST_ROW_CHARS:
        raise BadRow(
            f"the row has {len(text):,} characters, more than {MOST_ROW_CHARS:,} (about a million tokens)",
            "split it into rows (data.text_unit: document does so for text files)",
        )


def check_loss_spans(loss_spans: Iterable[tuple[int, int]], num_tokens: int, rendering: Rendering) -> None:
    """Raise BadRow when no token of the row is trained: a token counts with another before it."""
    if any(end > max(start, 1) for start, end in loss_spans):
        return
    if num_tokens < 2:
        raise BadRow(
            f"the row has {num_tokens} token{'' if num_tokens == 1 else 's'}: nothing to predict",
            "remove the row",
        )
    if rendering.assistant_only:
        raise BadRow(
            "no token of the row is the assistant's: there is no loss token",
            "give it an assistant message, train on all turns (data.assistant_only_loss: false)",
        )
    raise BadRow("the row has no loss token: its completion is empty", "remove the row")


def row_of_ids(example: Ids, num_tokens: int, stream: int, line: int) -> TokenRow:
    """A row that was tokenized already.

    Raises: BadRow for an id that the tokenizer has not, or a row that learns nothing.
    """
    ids = np.array(example.ids, np.int64)
    if ids.max() >= num_tokens:
        raise BadRow(
            f"the row holds the id {ids.max()}, and the tokenizer has {num_tokens} tokens",
            "tokenize the rows with the model's own tokenizer",
        )
    loss_mask = np.ones(len(ids), np.bool_) if example.labels is None else np.array(example.labels) == ids
    edges = np.flatnonzero(np.diff(np.concatenate([[False], loss_mask, [False]]).astype(np.int8)))
    loss_spans = tuple((int(start), int(end)) for start, end in edges.reshape(-1, 2))
    if not any(end > max(start, 1) for start, end in loss_spans):
        raise BadRow("the row has no loss token", "remove the row")
    return TokenRow(ids.astype(np.int32), (len(ids),), loss_spans, stream, line)


def row_of_pair(chosen: Encoded, rejected: Encoded, margin: float | None, stream: int, line: int) -> TokenRow:
    """[prompt][chosen][rejected]: the prompt is the common beginning, at most to the end of its text.

    So prompt and chosen together are the tokens of the two texts together, and so for rejected.
    Raises: BadRow when an answer has no token that could be predicted.
    """
    most = min(chosen.cut, rejected.cut)
    differs = np.flatnonzero(chosen.ids[:most] != rejected.ids[:most])
    num_prompt = int(differs[0]) if len(differs) else most
    first, second = chosen.ids[num_prompt:], rejected.ids[num_prompt:]
    seen = 0 if num_prompt else 1
    for name, answer in (("chosen", first), ("rejected", second)):
        if len(answer) <= seen:
            raise BadRow(f"the {name} answer has no loss token", "remove the row")
    ids = np.concatenate([chosen.ids, second])
    spans = ((num_prompt + seen, len(chosen.ids)), (len(chosen.ids) + seen, len(ids)))
    parts = (num_prompt, len(first), len(second))
    over = next((int(one.ids[one.cut]) for one in (chosen, rejected) if one.merged), None)
    merged = over is not None or num_prompt < most
    return TokenRow(ids, parts, spans, stream, line, merged=merged, merged_token=over, label=margin)


def batches(rows: Iterable[tuple[int, Line]], rows_at_once: int = ROWS_AT_ONCE) -> Iterator[Batch]:
    """Rows in batches of `rows_at_once`, fewer when they are long: with `CHARS_AT_ONCE` a batch ends too."""
    batch, size = Batch([], []), 0
    for stream, line in rows:
        batch.streams.append(stream)
        batch.lines.append(line)
        size += row_chars(line[1])
        if len(batch.lines) >= rows_at_once or size >= CHARS_AT_ONCE:
            yield batch
            batch, size = Batch([], []), 0
    if batch.lines:
        yield batch


def row_chars(row: Any) -> int:
    """Characters of a row, roughly: of its strings, and a little for each message or number of a list."""
    if isinstance(row, BadRow):
        return 0
    total = 0
    for value in row.values():
        if isinstance(value, str):
            total += len(value)
        elif isinstance(value, list):
            total += sum(len(str(item)) if isinstance(item, dict) else 4 for item in value)
    return total


def tokenized(rows: Iterable[tuple[int, Line]], job: Job, processes: int) -> Iterator[Tokenized]:
    """The batches of `rows`, tokenized, in their order, whatever the number of processes.

    Raises: DataError when one of several processes is killed.
    """
    if processes == 1:
        work = Tokenizing(job)
        for batch in batches(rows):
            yield work(batch)
        return
    from concurrent.futures import Future, ProcessPoolExecutor
    from concurrent.futures.process import BrokenProcessPool
    from multiprocessing import get_context

    try:
        with ProcessPoolExecutor(processes, get_context("spawn"), _begin, (job,)) as pool:
            waiting: deque[Future[Tokenized]] = deque()
            for batch in batches(rows):
                waiting.append(pool.submit(_work, batch))
                if len(waiting) > 2 * processes:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
    except BrokenProcessPool:
        raise DataError(
            f"one of the {processes} processes that tokenize was killed, or ended",
            "data.processes",
            "perhaps out of host memory: lower data.processes",
        ) from None


_own: list[Tokenizing] = []
"""The work of this process, once it has begun."""


def _begin(job: Job) -> None:
    _own.append(Tokenizing(job))


def _work(batch: Batch) -> Tokenized:
    return _own[0](batch)
