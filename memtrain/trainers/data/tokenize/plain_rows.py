"""Rows of plain strings to tokens, a batch at a time: no object for a row, and all places found at once.

A row becomes what `workers` makes of it one by one. A batch with any other row (messages, tools, a bad one)
is left to it. No torch here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from memtrain.recipes.formats.detect import FORMS, used_columns
from memtrain.recipes.formats.fields import TEMPLATE_KWARGS, BadRow, Names, Row, shown
from memtrain.recipes.formats.media import refuse_media
from memtrain.trainers.data.sources.readers import Line
from memtrain.trainers.data.store.token_store import Rows
from memtrain.trainers.data.tokenize.encode import Encoder
from memtrain.trainers.data.tokenize.render import Piece, Rendering
from memtrain.trainers.data.tokenize.unrendered import is_empty

MOST_ROW_CHARS = 2**22
"""Characters of a row's text. The tokenizer takes 400 bytes and 10 microseconds a token; a longer row is a
file that was not split, and far above every `length.max_length`."""
MOST_END_CHARS = 256
"""Of them for the end-of-sequence token."""


@dataclass(frozen=True, slots=True)
class Columns:
    """Columns of one source's plain rows."""

    prompt: str | None
    """None where the whole text is trained on."""
    answer: str
    used: frozenset[str]
    """All that the format reads."""

    @property
    def count(self) -> int:
        """Columns of a row that has no other."""
        return 1 if self.prompt is None else 2


@dataclass(slots=True)
class PlainTexts:
    """The texts of a batch: prompts with their answers."""

    texts: list[str] = field(default_factory=list[str])
    cuts: list[int] = field(default_factory=list[int])
    """Characters of each prompt."""
    text_bytes: list[int] = field(default_factory=list[int])
    cut_bytes: list[int] = field(default_factory=list[int])
    unused: Counter[str] = field(default_factory=Counter[str])
    """Rows that hold a column which is in none of their texts, by the column."""
    empty: list[int] = field(default_factory=list[int])
    """Places of the rows whose answer says nothing."""


def columns_of(form: str, names: Names, kind: str, rendering: Rendering) -> Columns | None:
    """Columns of plain rows of a source; None where its rows are read one by one."""
    fields: Sequence[str] = FORMS[form].strings
    # Where prompts are trained on too, spans begin elsewhere.
    if form != kind or not fields or (len(fields) > 1 and not rendering.completion_only):
        return None
    columns = [getattr(names, field) for field in fields]
    prompt = columns[-2] if len(columns) > 1 else None
    return Columns(prompt, columns[-1], used_columns(form, names))


def plain_texts(
    streams: Sequence[int], lines: Iterable[Line], columns: Sequence[Columns | None], end_token: str | None
) -> PlainTexts | None:
    """The texts of a batch, `columns` by number of the stream; None where a row of it is not plain."""
    made = PlainTexts()
    try:
        for stream, (_, row) in zip(streams, lines, strict=True):
            own = columns[stream]
            if own is None or isinstance(row, BadRow) or not _add(made, row, own, end_token):
                return None
    except (BadRow, UnicodeEncodeError):
        return None
    return made


def _add(made: PlainTexts, row: Row, own: Columns, end_token: str | None) -> bool:
    """Add the text of a row; False where it is not plain.

    Raises: BadRow for media; UnicodeEncodeError for half a character.
    """
    prompt: Any = "" if own.prompt is None else row.get(own.prompt)
    answer: Any = row.get(own.answer)
    if not isinstance(prompt, str) or not isinstance(answer, str) or not (prompt or answer):
        return False
    if len(prompt) + len(answer) > MOST_ROW_CHARS - MOST_END_CHARS:
        return False
    if len(row) > own.count:
        refuse_media(row, own.used)
        others = [column for column, value in row.items() if not is_empty(value)]
        if TEMPLATE_KWARGS in row or any(
            column in own.used and column not in (own.prompt, own.answer) for column in others
        ):
            return False
        made.unused.update(f"column {shown(column)}" for column in others if column not in own.used)
    if not answer.strip():
        made.empty.append(len(made.texts))
    text = prompt + answer
    if end_token is not None and not answer.endswith(end_token):
        text += end_token
    is_ascii = text.isascii()
    made.texts.append(text)
    made.cuts.append(len(prompt))
    made.text_bytes.append(len(text) if is_ascii else len(text.encode()))
    made.cut_bytes.append(len(prompt) if is_ascii else len(prompt.encode()))
    return True


def plain_rows(encoder: Encoder, made: PlainTexts, origin: list[tuple[int, int]], parts: int) -> Rows | None:
    """The tokens of plain texts; None where a row has nothing to learn, which is told row by row.

    `origin`: (stream, line) of each row. `parts` of a row: its prompt and its answer, or its text.
    """
    found = encoder.cut(made.texts, made.text_bytes, made.cut_bytes)
    sizes, cuts, merged = np.diff(found.bounds), found.cuts, found.merged
    # A normaliser changed these: their tokens are the same, and the tokenizer's own offsets tell the places.
    for at in np.flatnonzero(found.normalised & (np.array(made.cuts) > 0)).tolist():
        text, cut = made.texts[at], made.cuts[at]
        (one,) = encoder.encode([Piece(text, cut, ((cut, len(text)),), adds_specials=True)])
        cuts[at], merged[at] = one.cut, one.merged
    if not (sizes > np.maximum(cuts, 1)).all():
        return None
    at = int(np.flatnonzero(merged)[0]) if merged.any() else -1
    first = (*origin[at], int(found.ids[found.bounds[at] + cuts[at]])) if at >= 0 else None
    part_tokens = sizes if parts == 1 else np.stack([cuts, sizes - cuts], axis=1).reshape(-1)
    return Rows(
        ids=found.ids,
        part_tokens=part_tokens.astype(np.int64),
        span_counts=np.ones(len(sizes), np.int64),
        spans=np.stack([cuts, sizes], axis=1).astype(np.int64),
        origin=np.array(origin, np.int64).reshape(-1, 2),
        labels=np.full(len(sizes), np.nan, np.float32),
        num_merged=int(merged.sum()),
        first_merged=first,
    )
