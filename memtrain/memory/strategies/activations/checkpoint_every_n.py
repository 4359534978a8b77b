"""Checkpointing of every n-th layer: between none and all, in memory and in time.

When: the activations of some layers fit, those of all do not. Saves: what every n-th layer keeps but its
input. Costs: the forward pass of every n-th layer again. Exact: as activation checkpointing. Refused: with
boundary offloading kept as it is; the layers between are not offloaded.

Source: Chen et al. 2016, arXiv:1604.06174, section 4 (segments); the choice of layers is ours.
"""

from __future__ import annotations

from memtrain.memory.plan.settings import Settings
from memtrain.memory.strategies.base import ON_A_CPU, Strategy, StrategyContext, StrategyRequest, Updates
from memtrain.recipes.recipe import Recipe

DISTANCES = (6, 4, 2)
"""Distances that the search tries: a sixth, a quarter and a half of the layers. A sixth is predicted to cost
less than `ROOM_COST` of the speed even where adapters alone are trained. Taste."""


def wish(recipe: Recipe) -> StrategyRequest:
    """On when the recipe names a distance above one."""
    memory = recipe.memory
    if memory.activation_checkpointing == "off" or memory.checkpoint_every == 1:
        return "off"
    if memory.streamed_layers == "on":
        return "off"
    if memory.checkpoint_every == "auto":
        return "auto" if memory.activation_checkpointing == "auto" else "off"
    return memory.activation_checkpointing


def changes(settings: Settings, case: StrategyContext) -> tuple[Updates, ...]:
    """The distance that the recipe names, or several."""
    asked = case.recipe.memory.checkpoint_every
    layers = case.facts.shape.num_layers
    distances = tuple(n for n in DISTANCES if n < layers) if asked == "auto" else (asked,)
    return tuple({"checkpoint_every": n} for n in distances)


STRATEGY = Strategy(
    name="checkpoint_every_n",
    axis="checkpointing",
    summary="every n-th layer is checkpointed",
    saves="all activations but one tensor of every n-th layer",
    costs="the forward pass of every n-th layer again",
    measured=ON_A_CPU,
    is_exact=True,
    evidence="some layers twice",
    is_used=lambda settings: settings.checkpoint_every > 1,
    wish=wish,
    use_keys=lambda recipe: {"memory.activation_checkpointing": "on", "memory.checkpoint_every": 2},
    never_keys=lambda recipe: {"memory.checkpoint_every": 1},
    changes=changes,
    without={"checkpoint_every": 0, "offload": "none"},
)
