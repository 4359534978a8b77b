"""The sequences of each method's rows, for the plan and for the workers alike. No torch here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from memtrain.errors import DataError
from memtrain.memory.plan.length_profile import LengthProfile, joined_profile, longest_first, summed_report
from memtrain.memory.plan.plan import PreparedData
from memtrain.recipes.recipe import HAS_ANSWERS, Recipe
from memtrain.trainers.data.packing.answer_rows import AnswerSequences, lay_out_answers
from memtrain.trainers.data.packing.mixed_answers import MixedAnswers, mixed_answers
from memtrain.trainers.data.packing.prompt_rows import lay_out_completions
from memtrain.trainers.data.packing.token_rows import Sequences, Spans, lay_out
from memtrain.trainers.data.sources.splits import Chosen, choose_rows, epochs_of
from memtrain.trainers.data.store.token_store import TokenStore

Ints = NDArray[np.int64]


class Laid(Protocol):
    """Rows as sequences, with the facts that a plan needs."""

    @property
    def tokens(self) -> Ints:
        """Tokens of each sequence."""
        ...

    @property
    def profile(self) -> LengthProfile:
        """Lengths of the sequences, and the effects of truncation."""
        ...


@dataclass(frozen=True, slots=True)
class LaidEpochs:
    """The sequences of all epochs that have rows of their own."""

    tokens: Ints
    profile: LengthProfile
    epoch_ptr: Ints
    """[E + 1] where each epoch begins."""
    held_out: LengthProfile | None = None
    """Of all evaluation sets; None where there are none."""
    mixed: MixedAnswers | None = None
    """The same rows with the answers of others, where an evaluation reads them so."""


def sequences_of(recipe: Recipe, data: PreparedData, *, shares_prompts: bool) -> LaidEpochs:
    """The training rows as the workers will lay them out; with prompts computed once, or once an answer.

    Raises: DataError when none of them is left, or none of the held-out rows.
    """
    store = TokenStore.open(data.train.folder)
    chosen = choose_rows(recipe.data, store, recipe.train.seed, epochs_of(recipe.train))
    lay: Callable[[TokenStore, Ints, Recipe, bool], Laid] = (
        _completions if recipe.online is not None else _answers if recipe.method in HAS_ANSWERS else _tokens
    )
    epochs = [lay(store, rows, recipe, shares_prompts) for rows in (chosen.train, *chosen.later)]
    laid = LaidEpochs(
        tokens=np.concatenate([one.tokens for one in epochs]),
        profile=joined_profile([one.profile for one in epochs]),
        epoch_ptr=np.cumsum([0, *(len(one.tokens) for one in epochs)]),
    )
    if not laid.profile.report.num_sequences:
        raise DataError(*none_left(chosen.train, recipe, "rows"))
    held = held_out_of(recipe, data, store, chosen)
    if held is None:
        return laid
    sets = [lay(held.store, rows, recipe, shares_prompts) for rows in held.sets]
    profiles = [one.profile for one in sets]
    for name, rows, profile in zip(recipe.data.eval_sets or ("",), held.sets, profiles, strict=True):
        if not profile.report.num_sequences:
            of_set = f" of data.eval.{name}" if name else ""
            raise DataError(*none_left(rows, recipe, f"held-out rows{of_set}"))
    joined = joined_profile(profiles)
    whole = joined.model_copy(update={"report": summed_report([one.report for one in profiles])})
    answers = [one for one in sets if isinstance(one, AnswerSequences)]
    mixed = mixed_answers(held.store, answers) if recipe.mixes_answers else None
    return replace(laid, held_out=whole, mixed=mixed)


@dataclass(frozen=True, slots=True)
class HeldOut:
    """The rows that evaluation sees."""

    store: TokenStore
    sets: tuple[Ints, ...]
    """Rows of each evaluation set; one where sets have no names."""

    @property
    def rows(self) -> Ints:
        """Rows of all sets, one after the other."""
        return np.concatenate(self.sets)


def held_out_of(recipe: Recipe, data: PreparedData, store: TokenStore, chosen: Chosen) -> HeldOut | None:
    """The rows that evaluation sees, by set, with their store; None where there are none."""
    names = recipe.data.eval_sets
    if data.eval is not None:
        store = TokenStore.open(data.eval.folder)
        rows = np.arange(store.num_rows)
    else:
        rows = chosen.eval
    sets = [rows]
    if names:
        number_of = np.array([names.index(one.set) for one in recipe.data.eval if one.set is not None])
        set_of_row = number_of[np.array(store.meta.sources, np.int64)[store.origins[rows, 0]]]
        sets = [rows[set_of_row == number] for number in range(len(names))]
    if recipe.eval.max_rows is not None:
        sets = [one[:: -(-max(1, len(one)) // recipe.eval.max_rows)] for one in sets]
    return HeldOut(store, tuple(sets)) if len(rows) else None


def none_left(rows: Ints, recipe: Recipe, name: str) -> tuple[str, str, str]:
    """(what, where, fix) for rows of which none can be trained on."""
    length = recipe.row_limits
    longest = length.max_length
    limit = f"{longest} tokens" if longest is not None else "the limits of length:"
    what = f"none of {len(rows)} {name} is left"
    if length.truncation == "drop":
        return (
            f"{what}: all rows are longer than {limit}, and longer rows are dropped",
            "length.truncation",
            "raise length.max_length, or set length.truncation: keep_start or keep_end",
        )
    return (
        f"{what}: no loss token is within {limit}",
        "length.max_length",
        "raise length.max_length, or choose another length.truncation",
    )


def _tokens(store: TokenStore, rows: Ints, recipe: Recipe, shares_prompts: bool) -> Laid:
    spans = Spans(store.span_ptr, store.span_starts, store.span_ends)
    laid = lay_out(store.lengths, spans, rows, recipe.row_limits)
    if recipe.taught is None or not recipe.writes_completions:
        return laid
    return Written(laid.tokens, _with_completions(laid, store, recipe))


@dataclass(frozen=True, slots=True)
class Written:
    """Rows, and their prompts with completions of any length."""

    tokens: Ints
    profile: LengthProfile


def _with_completions(laid: Sequences, store: TokenStore, recipe: Recipe) -> LengthProfile:
    """The lengths of rows, or of their prompts with the longest completion, where that is longer."""
    row, start = laid.row[laid.bin_ptr[:-1]], laid.start[laid.bin_ptr[:-1]]
    first = store.span_starts[store.span_ptr[row]] - start
    prompt = np.where(first < 0, laid.tokens - 1, np.maximum(first, 1))
    written = prompt + recipe.generation.max_tokens
    if recipe.length.max_length is not None:
        written = np.minimum(written, recipe.length.max_length)
    longest = longest_first(np.maximum(laid.tokens, written))
    known = {"longest": longest, "longest_piece": max(longest, default=1)}
    return laid.profile.model_copy(update=known | {"most_loss_tokens": (), "loss_token_share": 1.0})


def _answers(store: TokenStore, rows: Ints, recipe: Recipe, shares_prompts: bool) -> Laid:
    return lay_out_answers(store, rows, recipe.row_limits, is_shared=shares_prompts)


def _completions(store: TokenStore, rows: Ints, recipe: Recipe, shares_prompts: bool) -> Laid:
    return lay_out_completions(store, rows, recipe, is_shared=shares_prompts)
