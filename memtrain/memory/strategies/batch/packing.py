"""Packing: several rows share one sequence of `max_length`, and none attends to another.

When: rows are much shorter than `max_length`, and the attention back end keeps rows apart. Saves: padding,
and with it every activation of padded tokens. Costs: the batch is counted in packed sequences, so a step
sees another number of rows. Exact: each row has the loss and gradients it has alone; which rows make a step
is another choice. Refused: with padded rows, and with answers, whose prompts and answers are laid end to end
by themselves.

Source: Krell et al. 2021, arXiv:2107.02027 (packing without contamination); best-fit decreasing as in Ding et
al. 2024, arXiv:2404.10830.
"""

from __future__ import annotations

from memtrain.memory.strategies.base import Conflict, Strategy, StrategyContext
from memtrain.recipes.recipe import HAS_ANSWERS


def refusal(case: StrategyContext) -> str | None:
    """Rows with answers are not packed, and packed rows need a length."""
    if case.recipe.method in HAS_ANSWERS or case.recipe.online is not None:
        return f"{case.recipe.method} concatenates prompts with their answers by itself"
    if case.recipe.length.max_length is None:
        return "packing fills sequences of max_length tokens, and length.max_length is null"
    return None


STRATEGY = Strategy(
    name="packing",
    axis="sequences",
    summary="several rows fill one sequence, and none attends to another",
    saves="padding, and sequences that are half empty",
    costs="a step is counted in packed sequences",
    measured="[packing](benchmarks.md#packing)",
    is_exact=True,
    evidence="rows in one sequence",
    is_used=lambda settings: settings.packing != "none",
    wish=lambda recipe: "on" if recipe.length.packing != "none" else "off",
    use_keys=lambda recipe: {"length.packing": "bfd"},
    never_keys=lambda recipe: {"length.packing": "none"},
    padded={"packing": "none", "cross_document_attention": False},
    refusal=refusal,
    conflicts=(
        Conflict(
            "padded rows",
            "packed rows are kept apart by their place in one flattened sequence",
            when=lambda settings: not settings.padding_free,
        ),
    ),
)
