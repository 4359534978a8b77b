"""Precomputed reference: the reference's log-probs in one pass before training, kept on disk.

When: methods with a reference that see the data more than once, or train every weight. Saves: a second copy
of the weights, and its forward pass in every further epoch. Costs: one forward pass over the data first.
Exact: the same model on the same rows. Refused: for methods and losses without a reference, and for one that
follows the policy.

Source: Rafailov et al. 2023, arXiv:2305.18290, section 4 (the reference is fixed); held by
tests/equal/test_preferences_are_exact.py.
"""

from __future__ import annotations

from collections.abc import Mapping

from memtrain.memory.strategies.base import ON_A_CPU, Strategy, StrategyContext, StrategyRequest
from memtrain.recipes.recipe import Recipe


def wish_of(recipe: Recipe, kind: str) -> StrategyRequest:
    """Request of the recipe for one source of the reference's log-probs."""
    section = recipe.compared
    if section is None:
        return "off"
    return "auto" if section.reference == "auto" else "on" if section.reference == kind else "off"


def keys_of(recipe: Recipe, kind: str) -> Mapping[str, object]:
    """The key that names a source of the reference's log-probs; none where nothing is compared."""
    return {} if recipe.compared is None else {f"{recipe.method}.reference": kind}


def _live(recipe: Recipe) -> str:
    """The reference that is asked in every step."""
    adapter = recipe.model.adapter
    return "copy" if adapter is None else adapter.at_rest


def refusal(case: StrategyContext) -> str | None:
    """Reason where nothing is compared with a reference."""
    if case.recipe.compared is None:
        return f"{case.recipe.method} needs no reference here"
    return None


STRATEGY = Strategy(
    name="precomputed_reference",
    axis="reference",
    summary="the reference's log-probs in one pass before training",
    saves="a second copy of the weights, and its forward passes",
    costs="one forward pass over the data first",
    measured=ON_A_CPU,
    is_exact=True,
    evidence="log-probs in the feed",
    is_used=lambda settings: settings.reference == "precomputed",
    wish=lambda recipe: wish_of(recipe, "precomputed"),
    use_keys=lambda recipe: keys_of(recipe, "precomputed"),
    never_keys=lambda recipe: keys_of(recipe, _live(recipe)),
    without={"reference": "copy"},
    refusal=refusal,
)
