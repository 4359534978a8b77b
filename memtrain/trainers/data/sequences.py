"""The sequences of each method's rows, for the plan and for the workers alike. No torch here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from memtrain.errors import DataError
from memtrain.memory.lengths import LengthProfile
from memtrain.memory.plan import PreparedData
from memtrain.recipes.recipe import HAS_ANSWERS, Recipe
from memtrain.trainers.data.answers import lay_out_answers
from memtrain.trainers.data.pieces import Spans, lay_out
from memtrain.trainers.data.prompts import lay_out_completions
from memtrain.trainers.data.rows import choose_rows
from memtrain.trainers.data.store import TokenStore

Ints = NDArray[np.int64]


class Laid(Protocol):
    """Rows as sequences: what a plan needs to know of them."""

    @property
    def tokens(self) -> Ints:
        """Tokens of each sequence."""
        ...

    @property
    def profile(self) -> LengthProfile:
        """Their lengths, and what truncation did."""
        ...


def sequences_of(recipe: Recipe, data: PreparedData, *, shares_prompts: bool) -> Laid:
    """The training rows as the workers will lay them out; with prompts computed once, or once an answer.

    Raises: DataError when none is left.
    """
    store = TokenStore.open(data.train.folder)
    rows = choose_rows(recipe.data, store, recipe.train.seed).train
    lay: Callable[[TokenStore, Ints, Recipe, bool], Laid] = (
        _completions if recipe.online is not None else _answers if recipe.method in HAS_ANSWERS else _tokens
    )
    laid = lay(store, rows, recipe, shares_prompts)
    if not laid.profile.report.num_sequences:
        raise DataError(*_none_left(store, rows, recipe))
    return laid


def _none_left(store: TokenStore, rows: Ints, recipe: Recipe) -> tuple[str, str, str]:
    """What, where and fix for rows of which none can be learnt from."""
    longest = recipe.length.max_length
    what = f"none of {len(rows)} rows is left"
    if recipe.length.truncation == "drop":
        shortest = int(store.lengths[rows].min())
        return (
            f"{what}: the shortest has {shortest:,} tokens, and rows longer than {longest} are left out",
            "length.truncation",
            "raise length.max_length, or set length.truncation: keep_start or keep_end",
        )
    return (
        f"{what}: nothing that is learnt lies within {longest} tokens",
        "length.max_length",
        "raise length.max_length, or choose another length.truncation",
    )


def _tokens(store: TokenStore, rows: Ints, recipe: Recipe, shares_prompts: bool) -> Laid:
    return lay_out(
        store.lengths, Spans(store.span_ptr, store.span_starts, store.span_ends), rows, recipe.length
    )


def _answers(store: TokenStore, rows: Ints, recipe: Recipe, shares_prompts: bool) -> Laid:
    return lay_out_answers(store, rows, recipe.length, is_shared=shares_prompts)


def _completions(store: TokenStore, rows: Ints, recipe: Recipe, shares_prompts: bool) -> Laid:
    return lay_out_completions(store, rows, recipe, is_shared=shares_prompts)
