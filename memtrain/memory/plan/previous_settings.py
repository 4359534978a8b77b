"""Plans and checkpoints that were saved under previous names -> today's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from pydantic import JsonValue

from memtrain.recipes.reading.previous_names import PREVIOUS_VALUES, renewed_json

PREVIOUS_SETTINGS: dict[str, str] = {
    "batch_rows": "batch_size",
    "micro_rows": "micro_batch_size",
    "documents_see_each_other": "cross_document_attention",
    "rehearse": "preflight",
}
"""Fields of the settings: the previous name, and today's."""

PREVIOUS_COUNTS: dict[str, str] = {
    "learnt_cut": "loss_tokens_cut",
    "learnt_dropped": "loss_tokens_dropped",
    "learnt_cut_by_answer": "loss_tokens_cut_by_answer",
    "most_learnt": "most_loss_tokens",
    "learnt_share": "loss_token_share",
}
"""Counts of a plan's data: the previous name, and today's."""

HOLD_VALUES: dict[str, str] = {
    "attention": "model.attention",
    "context_by": "cluster.context_parallel_mode",
}
"""Settings whose value is the word of a recipe key."""


def renewed_settings(saved: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    """Settings as they were saved, with today's names."""
    made: dict[str, JsonValue] = {}
    for name, value in saved.items():
        new = PREVIOUS_SETTINGS.get(name, name)
        words = PREVIOUS_VALUES.get(HOLD_VALUES.get(new, ""), {})
        made[new] = words.get(value, value) if isinstance(value, str) else value
    return made


def renewed_recipe(saved: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    """A recipe as it was saved, with today's names."""
    return cast(dict[str, JsonValue], renewed_json(dict(saved)))


def renewed_counts(saved: dict[str, JsonValue]) -> dict[str, JsonValue]:
    """An object of a plan as it was saved, its counts under today's names."""
    return {PREVIOUS_COUNTS.get(name, name): value for name, value in saved.items()}
