"""Shared prompts: a prompt is computed once for all its answers, which do not attend to each other.

When: preference and online methods, on every attention back end that keeps rows apart. Saves: the prompt's
activations and its work, once for each further answer: near half where prompts are long. Costs: nothing.
Exact: each answer has the numbers it has in a row of its own. Refused: with padded rows, which hold one
answer each.

Source: our two-part attention (the answer attends to the prompt and to itself, the parts are merged by their
log-sum-exp as in Ye et al. 2024, arXiv:2402.05099), equal to duplicated prompts by
tests/equal/test_shared_prompt_equals_duplicated.py.
"""

from __future__ import annotations

from collections.abc import Mapping

from memtrain.memory.strategies.base import Conflict, Strategy, StrategyContext, StrategyRequest
from memtrain.recipes.recipe import HAS_ANSWERS, Recipe


def wish(recipe: Recipe) -> StrategyRequest:
    """Request of the recipe; where it makes none, prompts are shared wherever they can be."""
    shared = recipe.length.shared_prompts
    return "auto" if shared is None else "on" if shared else "off"


def keys_of(recipe: Recipe, *, is_shared: bool) -> Mapping[str, object]:
    """The key, where rows have answers; elsewhere it would have no effect."""
    has_answers = recipe.method in HAS_ANSWERS or recipe.online is not None
    return {"length.shared_prompts": is_shared} if has_answers else {}


def refusal(case: StrategyContext) -> str | None:
    """Rows without answers have no prompt to share."""
    if case.facts.unshared is None and case.recipe.method not in HAS_ANSWERS:
        return f"the rows of {case.recipe.method} have no answers that could share a prompt"
    return None


STRATEGY = Strategy(
    name="shared_prompts",
    axis="prompts",
    summary="a prompt is computed once for all its answers",
    saves="the activations and the work of each repeated prompt",
    costs="nothing",
    measured="[pairs](preference.md#shared-prompts), [groups](online.md#shared-prompts)",
    is_exact=True,
    evidence="fewer tokens",
    is_used=lambda settings: settings.shared_prompts,
    wish=wish,
    use_keys=lambda recipe: keys_of(recipe, is_shared=True),
    never_keys=lambda recipe: keys_of(recipe, is_shared=False),
    padded={"shared_prompts": False},
    refusal=refusal,
    conflicts=(
        Conflict(
            "padded rows", "a padded row holds one answer", when=lambda settings: not settings.padding_free
        ),
    ),
)
