"""First rows of a recipe's sources as tokens, and cut as a run cuts them, for `memtrain check`; no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from memtrain.errors import DataError
from memtrain.recipes.formats.detect import FORMS, METHOD_FORMATS, SUPERVISED
from memtrain.recipes.formats.fields import BadRow
from memtrain.recipes.recipe import Recipe
from memtrain.trainers.data.packing.by_method import none_left
from memtrain.trainers.data.packing.token_rows import Spans, count_loss_tokens, pieces_of
from memtrain.trainers.data.store.look_into import Found, kind_of, rendering_of
from memtrain.trainers.data.tokenize.chat import turn_end_of
from memtrain.trainers.data.tokenize.workers import Batch, Job, Tokenized, Tokenizing, row_chars

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

MOST_CHARS = 2**24
"""Characters of a source's rows after which no more are taken. Taste: a few seconds of a tokenizer."""


@dataclass(frozen=True, slots=True)
class FirstRows:
    """The first rows of each source as tokens; the line of each is its number among them."""

    job: Job
    places: tuple[str, ...]
    made: Tokenized
    is_all: bool
    """Whether the sources have no other."""


def first_rows_as_tokens(
    recipe: Recipe, found: Sequence[Found], tokenizer: PreTrainedTokenizerFast, most: int
) -> FirstRows:
    """The first `most` rows of each source, tokenized, fewer of long ones; those that cannot be read are left
    out.

    Raises: DataError where a setting of `data:` has no effect on rows of these formats.
    """
    kind = kind_of(found, METHOD_FORMATS[recipe.method])
    rendering = rendering_of(recipe.data, tokenizer, kind, found)
    job = Job(tokenizer.backend_tokenizer.to_str(), rendering, kind, tuple(one.reading for one in found))
    places, batch, is_all = list[str](), Batch([], []), True
    for number, one in enumerate(found):
        chars = 0
        for count, (place, row) in enumerate(islice(one.rows(), most + 1)):
            if count == most or chars > MOST_CHARS:
                is_all = False
                break
            chars += row_chars(row)
            if not isinstance(row, BadRow):
                batch.streams.append(number)
                batch.lines.append((len(places), row))
                places.append(place)
    return FirstRows(job, tuple(places), Tokenizing(job)(batch), is_all)


def first_rows_kept(
    recipe: Recipe, found: Sequence[Found], tokenizer: PreTrainedTokenizerFast, first: FirstRows
) -> str:
    """How many of the first rows keep a loss token, in words, and how many learn to end a turn. Empty of
    pairs, of judged answers, and of prompts.

    Raises: DataError where these are all rows and none keeps one.
    """
    rendering, kind, made = first.job.rendering, first.job.kind, first.made.rows
    if kind not in SUPERVISED:
        return ""
    tokens, ptr = (
        made.part_tokens.reshape(-1, len(FORMS[kind].parts)).sum(1),
        np.concatenate([[0], np.cumsum(made.span_counts)]),
    )
    if not len(tokens):
        return ""
    spans = Spans(ptr, made.spans[:, 0], made.spans[:, 1])
    row, start, length = pieces_of(tokens, recipe.row_limits)
    kept = np.unique(row[count_loss_tokens(spans, row, start, length) > 0])
    if not len(kept) and first.is_all:
        raise DataError(*none_left(np.arange(len(tokens)), recipe, "rows"))
    words = f"{len(kept):,} of the first {len(tokens):,} rows keep a loss token"
    chats = [one.reading for one in found if one.reading.is_chat]
    end = turn_end_of(tokenizer, chats[0].template_kwargs) if chats else None
    token_id, token = (None, "") if end is None else (end.token_id, end.token)
    if end is None and rendering.end_token is not None:
        token_id, token = tokenizer.convert_tokens_to_ids(rendering.end_token), rendering.end_token
    if token_id is None:
        return f"{words}; no token ends them"
    begins = np.concatenate([[0], np.cumsum(tokens)])
    learn: set[int] = set()
    for at, first, count in zip(row.tolist(), start.tolist(), length.tolist(), strict=True):
        own = made.ids[begins[at] + first : begins[at] + first + count]
        for begin, stop in made.spans[ptr[at] : ptr[at + 1]].tolist():
            if (own[max(begin - first, 0) : max(stop - first, 0)] == token_id).any():
                learn.add(at)
    ended = "turn" if chats else "text"
    return f"{words}; {len(learn):,} have {token}, which ends a {ended}, among their loss tokens"
