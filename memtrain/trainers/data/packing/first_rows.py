"""First rows of a recipe's sources, tokenized and cut as a run cuts them, for `memtrain check`; no torch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from memtrain.errors import DataError
from memtrain.recipes.formats.detect import FORMS, SUPERVISED
from memtrain.recipes.recipe import Recipe
from memtrain.trainers.data.packing.by_method import none_left
from memtrain.trainers.data.packing.token_rows import Spans, count_loss_tokens, pieces_of
from memtrain.trainers.data.store.look_into import Found
from memtrain.trainers.data.tokenize.chat import turn_end_of
from memtrain.trainers.data.tokenize.render import Rendering
from memtrain.trainers.data.tokenize.workers import Batch, Job, Tokenizing

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def first_rows_kept(
    recipe: Recipe,
    found: Sequence[Found],
    tokenizer: PreTrainedTokenizerFast,
    rendering: Rendering,
    kind: str,
    most: int,
) -> str:
    """How many of the first `most` rows of each source keep a loss token, in words, and how many learn to end
    a turn. Empty of pairs, of judged answers, and of prompts.

    Raises: DataError where these are all rows and none keeps one.
    """
    if kind not in SUPERVISED:
        return ""
    streams, lines, is_all = list[int](), list[tuple[int, object]](), True
    number = 0
    for source in found:
        begun = islice(
            ((number + at, line) for at, one in enumerate(source.streams) for line in one.read()), most + 1
        )
        rows = list(begun)
        is_all = is_all and len(rows) <= most
        streams += [at for at, _ in rows[:most]]
        lines += [line for _, line in rows[:most]]
        number += len(source.streams)
    readings = tuple(one.reading for one in found for _ in one.streams)
    job = Job(tokenizer.backend_tokenizer.to_str(), rendering, kind, readings)
    made = Tokenizing(job)(Batch(streams, lines)).rows  # pyright: ignore[reportArgumentType] lines of streams
    tokens, ptr = (
        made.part_tokens.reshape(-1, len(FORMS[kind].parts)).sum(1),
        np.concatenate([[0], np.cumsum(made.span_counts)]),
    )
    if not len(tokens):
        return ""
    spans = Spans(ptr, made.spans[:, 0], made.spans[:, 1])
    row, start, length = pieces_of(tokens, recipe.row_limits)
    kept = np.unique(row[count_loss_tokens(spans, row, start, length) > 0])
    if not len(kept) and is_all:
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
