"""Prompts of held-out rows with the answers that the rows have: what `eval.metrics` asks, and compares with.

The prompt of a row is all before its last trained span; of a row with answers, the prompt that they share. No
torch here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memtrain.errors import DataError
from memtrain.memory.plan.plan import PreparedData
from memtrain.recipes.recipe import HAS_ANSWERS, Recipe
from memtrain.trainers.data.packing.by_method import held_out_of
from memtrain.trainers.data.sources.splits import choose_rows
from memtrain.trainers.data.store.token_store import TokenStore

Ints = NDArray[np.int64]

COLUMNS = ("reference", "answer")
"""Names under which a function gets the answer of the row: its own, and that of the built-in rewards."""


@dataclass(frozen=True, slots=True)
class HeldOutPrompt:
    """A prompt, and the answer of its row."""

    ids: tuple[int, ...]
    answer_ids: tuple[int, ...]


def held_out_prompts(recipe: Recipe, data: PreparedData) -> tuple[tuple[HeldOutPrompt, ...], ...]:
    """By evaluation set, the prompts that `eval.metrics` asks: of evenly spaced rows, of those that have one.

    Raises: DataError when a set has none: all of its rows are trained on from their first token on.
    """
    asked = recipe.eval.metrics
    store = TokenStore.open(data.train.folder)
    held = held_out_of(recipe, data, store, choose_rows(recipe.data, store, recipe.train.seed))
    assert asked is not None, "Only a recipe with eval.metrics asks held-out rows."
    assert held is not None, "A recipe with eval.metrics has held-out rows."
    made: list[tuple[HeldOutPrompt, ...]] = []
    for name, rows in zip(recipe.data.eval_sets or ("",), held.sets, strict=True):
        spaced = rows[:: -(-max(1, len(rows)) // asked.max_rows)]
        found = tuple(
            prompt for row in spaced.tolist() if (prompt := _prompt_of(held.store, row, recipe)) is not None
        )
        if not found:
            of_set = f" of {name}" if name else ""
            raise DataError(
                f"no held-out row{of_set} has a prompt: all are trained on from their first token",
                "eval.metrics",
                "use rows of a prompt with a completion; of messages, remove data.assistant_only_loss: false",
            )
        made.append(found)
    return tuple(made)


def longest_written_prompt(recipe: Recipe, data: PreparedData) -> int:
    """Tokens of the longest prompt of `eval.samples` and `eval.metrics`. Raises: as `held_out_prompts`."""
    lengths = [len(one.ids) for one in data.samples]
    if recipe.eval.metrics is not None:
        lengths += [len(one.ids) for of_set in held_out_prompts(recipe, data) for one in of_set]
    return max(lengths, default=0)


def num_written(recipe: Recipe, data: PreparedData) -> int:
    """Prompts of the one of the two that has most; 1 at least."""
    metrics = recipe.eval.metrics
    of_metrics = sum(map(len, held_out_prompts(recipe, data))) if metrics is not None else 0
    return max(1, len(data.samples), of_metrics)


def _prompt_of(store: TokenStore, row: int, recipe: Recipe) -> HeldOutPrompt | None:
    ids: Sequence[int] = store.row(row).tolist()
    if recipe.method in HAS_ANSWERS:
        first = int(store.part_lengths[row][0])
        answer = store.part(row, store.meta.parts[1]).tolist()
        return HeldOutPrompt(tuple(ids[:first]), tuple(answer)) if first else None
    spans = store.spans(row)
    start, end = spans[-1] if spans else (0, 0)
    return HeldOutPrompt(tuple(ids[:start]), tuple(ids[start:end])) if start else None
