"""Padding-free rows: the rows of a micro-batch lie end to end in one sequence, and none attends to another.

When: always, where an attention back end keeps rows apart. Saves: all activations of padding, which in a
batch of unlike lengths is often half of all. Costs: nothing. Exact: each row has the numbers it has alone.
Refused: where attention cannot be computed row by row (chunks, dropped scores, layers with a state).

Source: Kundu et al. 2024, arXiv:2407.09105 (padding-free training with position ids); equal to single rows
by tests/equal/test_packed_equals_alone.py.
"""

from __future__ import annotations

from memtrain.memory.strategies.base import ON_A_CPU, Strategy, StrategyRequest
from memtrain.recipes.recipe import Recipe


def wish(recipe: Recipe) -> StrategyRequest:
    """Request of the recipe; where it makes none, rows are flat wherever they can be."""
    flat = recipe.length.padding_free
    return "auto" if flat is None else "on" if flat else "off"


STRATEGY = Strategy(
    name="padding_free",
    axis="rows",
    summary="rows of a micro-batch are concatenated, and none attends to another",
    saves="all activations of padding",
    costs="nothing",
    measured=ON_A_CPU,
    is_exact=True,
    evidence="rows end to end",
    is_used=lambda settings: settings.padding_free,
    wish=wish,
    use_keys=lambda recipe: {"length.padding_free": True},
    never_keys=lambda recipe: {"length.padding_free": False},
    padded={"padding_free": False},
)
