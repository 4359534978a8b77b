"""Prompts of the methods that write their own answers: truncated, counted, and as long as they may become.

No torch here. A sequence is a completion yet to be written; its length is the longest it may get.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memtrain.errors import DataError
from memtrain.memory.plan.length_profile import NUM_LONGEST, LengthProfile, LengthReport, longest_first
from memtrain.memory.plan.prompt_groups import prompt_groups
from memtrain.recipes.recipe import Recipe
from memtrain.recipes.sections.length import RowLimits
from memtrain.trainers.data.store.token_store import TokenStore

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Prompts:
    """The kept prompts, and the report of truncation."""

    row: Ints
    """[R] row of each prompt in the store."""
    start: Ints
    """[R] its first token that is kept."""
    length: Ints
    """[R] tokens that are kept."""
    report: LengthReport


@dataclass(frozen=True, slots=True)
class Completions:
    """Completions to be written, as sequences of a plan."""

    tokens: Ints
    """Most tokens of each, its prompt's included."""
    profile: LengthProfile


def lay_out_prompts(store: TokenStore, rows: Ints, length: RowLimits, *, each: int) -> Prompts:
    """Truncate the prompts of `rows`, of `each` completions, to `length.max_prompt`. A pure function.

    Raises: DataError when none is left.
    """
    whole = store.lengths[rows]
    limit, how = length.max_prompt, length.truncation
    fits = np.ones(len(rows), np.bool_) if limit is None else whole <= limit
    kept = whole > 0 if how != "drop" else fits & (whole > 0)
    left = whole if limit is None else np.minimum(whole, limit)
    start = whole - left if how == "keep_end" else np.zeros_like(whole)
    if not kept.any():
        raise DataError(
            f"none of {len(rows)} prompts are left: all are longer than {limit} tokens",
            "length.truncation",
            "raise length.max_length, or set length.truncation: keep_end",
        )
    is_cut = kept & ~fits
    count = int(kept.sum()) * each
    report = LengthReport(
        num_rows=len(rows),
        num_tokens=int(whole.sum()),
        num_loss_tokens=0,
        rows_cut=int(is_cut.sum()),
        rows_dropped=int((~kept).sum()),
        rows_split=0,
        pieces=count,
        tokens_cut=int((whole - left)[is_cut].sum()),
        tokens_dropped=int(whole[~kept].sum()),
        tokens_idle=0,
        loss_tokens_cut=0,
        loss_tokens_dropped=0,
        num_sequences=count,
        fill=1.0,
    )
    return Prompts(rows[kept], start[kept], left[kept], report)


def lay_out_completions(store: TokenStore, rows: Ints, recipe: Recipe, *, is_shared: bool) -> Completions:
    """The completions of the prompts of `rows`, each as long as it may get.

    A shared prompt is counted once in the total, and in every single length: a completion may stand alone.
    """
    generate = recipe.generation
    prompts = lay_out_prompts(store, rows, recipe.row_limits, each=generate.num_generations)
    each = prompts.length + generate.max_tokens
    tokens = np.repeat(each, generate.num_generations)
    repeated = int(prompts.length.sum()) * (generate.num_generations - 1)
    return Completions(
        tokens=tokens,
        profile=LengthProfile(
            report=prompts.report,
            total_tokens=int(tokens.sum()) - (repeated if is_shared else 0),
            longest=longest_first(tokens),
            longest_piece=int(each.max()),
            most_loss_tokens=(generate.max_tokens,) * min(len(tokens), NUM_LONGEST),
            groups=prompt_groups(recipe, is_shared=is_shared),
        ),
    )
