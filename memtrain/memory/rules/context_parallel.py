"""Context parallelism: several processes hold each row together, a slice each. What it refuses and pads."""

from __future__ import annotations

import math
from collections.abc import Mapping

from memtrain.memory.model_shape.length_rules import length_rules, reached
from memtrain.memory.model_shape.shape import ModelShape
from memtrain.memory.plan.settings import Settings
from memtrain.memory.rules.attention import MERGED, NOT_SLICED, AttentionChoice
from memtrain.memory.rules.ledger import DecisionLog
from memtrain.recipes.recipe import Recipe

PATH = "cluster.context_parallel"


NOT_WITH_LIGER = "Liger's loss is untested on slices of rows"


SETTING = "context_parallel"
"""Name of the decision and of the setting: processes that hold each row together."""


def held_by(size: int) -> dict[str, object]:
    """The settings of rows that are held by so many processes together."""
    return {SETTING: size}


def sharing_settings(recipe: Recipe) -> dict[str, object]:
    """Settings of rows that several processes hold: their number, their exchange, and the padding of rows."""
    cluster, size = recipe.cluster, recipe.cluster.sharing
    return held_by(size) | {
        "context_by": cluster.context_parallel_mode if size > 1 else "all_gather",
        "pad_to_multiple_of": row_multiple(recipe.length.pad_to_multiple_of, size),
    }


def explain_sharing(ledger: DecisionLog, settings: Settings, gained: str) -> None:
    """Note the number of processes that hold each row, and the saving."""
    words = (
        f"processes share each row, by {settings.context_by}; rows are padded to a multiple of "
        f"{settings.pad_to_multiple_of}; {gained}"
    )
    ledger.decide(SETTING, settings.context_parallel, words, PATH)


def refuse_context(
    ledger: DecisionLog, processes: int, config: Mapping[str, object], shape: ModelShape
) -> None:
    """Note what `cluster.context_parallel` cannot be with, and processes that it does not divide."""
    size = ledger.asked.recipe.cluster.sharing
    if size == 1:
        return
    if processes % size:
        near = max(size, round(processes / size) * size)
        ledger.refuse(
            f"{processes} processes cannot be divided into groups of {size}",
            PATH,
            f"set cluster.processes to a multiple, such as {near}, or {PATH} to a divisor of {processes}",
        )
    _refuse_heads(ledger, size, shape.num_heads, shape.num_kv_heads)
    for what, path, fix in context_faults(ledger.asked.recipe, config):
        ledger.refuse(f"{PATH} {size}: {what}", path, fix)


def copies_of_keys(num_heads: int, num_key_heads: int, num_ranks: int) -> int:
    """Copies of each head of keys that are sent so that every rank has its heads' keys; 0: no even division.

    Ranks that hold a row together take as many heads each; see trainers/model/attention/by_heads.py.
    """
    if num_heads % num_ranks:
        return 0
    if num_key_heads % num_ranks == 0:
        return 1
    return 0 if num_ranks % num_key_heads else num_ranks // num_key_heads


def _refuse_heads(ledger: DecisionLog, size: int, num_heads: int, num_key_heads: int) -> None:
    by = "cluster.context_parallel_mode"
    if ledger.asked.recipe.cluster.context_parallel_mode == "all_gather":
        return
    if not copies_of_keys(num_heads, num_key_heads, size):
        able = [n for n in range(2, num_heads + 1) if copies_of_keys(num_heads, num_key_heads, n)]
        ledger.refuse(
            f"{by} heads: {num_heads} heads with {num_key_heads} of keys cannot be divided evenly over "
            f"{size} "
            "processes",
            by,
            f"set it to all_gather, or {PATH} to one of "
            f"{', '.join(map(str, able)) or 'none: it has no other'}",
        )


def refuse_attention(ledger: DecisionLog, choice: AttentionChoice) -> None:
    """Note a back end that cannot attend over slices, with the reason why no other is taken."""
    if ledger.asked.recipe.cluster.sharing == 1 or choice.backend in MERGED:
        return
    others = "; ".join(f"{backend}: {why}" for backend, why in choice.refused if backend in MERGED)
    ledger.refuse(
        f"{PATH} with {choice.backend} attention: {NOT_SLICED}{f' ({others})' if others else ''}",
        "model.attention" if ledger.asked.is_set("model.attention") else PATH,
        f"use {', '.join(MERGED)} attention, or set {PATH}: 1",
    )


def context_faults(recipe: Recipe, config: Mapping[str, object]) -> list[tuple[str, str, str]]:
    """(what, where, fix) of each part of a recipe and a model that slices of rows cannot honour."""
    faults: list[tuple[str, str, str]] = []
    if recipe.online is not None:
        faults.append(
            (
                f"completions of {recipe.method} are generated and scored by single processes",
                PATH,
                f"remove it for {recipe.method}",
            )
        )
    if recipe.optim.neftune_alpha is not None:
        faults.append(
            (
                "noise on the embeddings is scaled by the length of a row, and each process sees only a "
                "slice of the row",
                "optim.neftune_alpha",
                f"remove it, or set {PATH}: 1",
            )
        )
    if recipe.memory.loss == "liger":
        faults.append((NOT_WITH_LIGER, "memory.loss", f"set it to chunked, or {PATH}: 1"))
    rule = reached(length_rules(config), recipe.length.max_length, "row")
    if rule is not None:
        faults.append(
            (
                f"{rule.summary}, and each process sees only a slice of the row",
                PATH,
                f"remove it for this model, or set length.max_length to at most {rule.tokens}",
            )
        )
    return faults


def row_multiple(multiple: int | None, size: int) -> int | None:
    """Multiple that rows are padded to: the recipe's own number, and twice the processes of a row."""
    return multiple if size == 1 else math.lcm(multiple or 1, 2 * size)
