"""Whether held-out rows have prompts for `eval.metrics`, looked at in their first rows; no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from memtrain.errors import DataError
from memtrain.recipes.formats.detect import FORMS, METHOD_FORMATS
from memtrain.recipes.formats.fields import BadRow
from memtrain.recipes.recipe import HAS_ANSWERS, Recipe

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from memtrain.trainers.data.store.look_into import Found
    from memtrain.trainers.data.tokenize.render import Piece, Rendering

FIRST_ROWS = 100
"""Rows that are rendered. Taste: rows of one format mostly have prompts, or have none."""


def metric_words(recipe: Recipe, found: Sequence[Found], tokenizer: PreTrainedTokenizerFast) -> str:
    """The first rows that have a prompt, in words; nothing where no metric asks for one.

    Raises: DataError when no row has one: the files end there, or rows of text are trained on whole.
    """
    from memtrain.trainers.data.store.look_into import kind_of, rendering_of
    from memtrain.trainers.data.tokenize.encode import Encoder

    if recipe.eval.metrics is None or recipe.method in HAS_ANSWERS:
        return ""
    kind = kind_of(found, METHOD_FORMATS[recipe.method])
    rendering = rendering_of(recipe.data, tokenizer, kind, found)
    pieces = list(islice(_pieces(found, rendering), FIRST_ROWS))
    encoded = Encoder(tokenizer.backend_tokenizer.to_str()).encode(pieces)
    prompts = sum(1 for one in encoded if one.loss_spans and one.loss_spans[-1][0])
    rows = f"the first {len(pieces):,} rows"
    if prompts:
        return f"{prompts:,} of {rows} have a prompt to answer"
    if len(pieces) == FIRST_ROWS and {one.reading.form for one in found} != {"text"}:
        return f"none of {rows} has a prompt to answer, and a run needs one in each held-out set"
    raise DataError(
        "no held-out row has a prompt: all are trained on from their first token",
        "eval.metrics",
        "use rows of a prompt with a completion; of messages, remove data.assistant_only_loss: false",
    )


def _pieces(found: Sequence[Found], rendering: Rendering) -> Iterator[Piece]:
    from memtrain.trainers.data.tokenize.render import render

    for one in found:
        form = FORMS[one.reading.form]
        for _, row in one.rows():
            try:
                if not isinstance(row, BadRow):
                    yield from render(form.parse(row, one.reading.names), rendering)
            except BadRow:
                continue
