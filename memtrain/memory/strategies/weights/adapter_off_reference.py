"""Adapter-off reference: the policy with its adapter switched off is the reference, so none is held.

When: methods with a reference that train an adapter and see the data once. Saves: a second copy of the
weights. Costs: one more forward pass in every step. Exact: the frozen weights are the reference. Refused:
without an adapter, and for methods and losses without a reference.

Source: Hu et al. 2021, arXiv:2106.09685 (the frozen weights are untouched); held by
tests/equal/test_preferences_are_exact.py.
"""

from __future__ import annotations

from memtrain.memory.strategies.base import ON_A_CPU, Conflict, Strategy, StrategyContext
from memtrain.memory.strategies.weights import precomputed_reference
from memtrain.recipes.recipe import Recipe


def kind_of(recipe: Recipe) -> str:
    """The adapter switched off; or of one that is continued switched to its start."""
    adapter, section = recipe.model.adapter, recipe.compared
    is_off = section is not None and section.reference == "adapter_off"
    return "adapter_off" if adapter is None or is_off else adapter.at_rest


def refusal(case: StrategyContext) -> str | None:
    """Reason where there is no reference, or no adapter to switch off."""
    if case.recipe.model.adapter is None and case.recipe.compared is not None:
        return "there is no adapter to switch off: every weight is trained"
    return precomputed_reference.refusal(case)


STRATEGY = Strategy(
    name="adapter_off_reference",
    axis="reference",
    summary="the policy with its adapter switched off is the reference",
    saves="a second copy of the weights",
    costs="one more forward pass in every step",
    measured=ON_A_CPU,
    is_exact=True,
    evidence="policy as reference",
    is_used=lambda settings: settings.reference in ("adapter_off", "adapter_start"),
    wish=lambda recipe: precomputed_reference.wish_of(recipe, kind_of(recipe)),
    use_keys=lambda recipe: precomputed_reference.keys_of(recipe, kind_of(recipe)),
    never_keys=lambda recipe: precomputed_reference.keys_of(recipe, "precomputed"),
    without={"reference": "copy"},
    refusal=refusal,
    conflicts=(
        Conflict(
            "every weight trained",
            "there is no adapter to switch off",
            when=lambda settings: settings.adapter is None,
        ),
    ),
)
