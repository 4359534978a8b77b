"""Activation checkpointing: each layer keeps its input, and computes the rest again in the backward pass.

When: activations are what does not fit. Saves: everything a layer keeps but one tensor; one layer's set is
alive at a time. Costs: one more forward pass through the layers, 20-33 % of a step. Exact: the same
operations on the same inputs, with the same random numbers. Refused: never.

Source: Chen et al. 2016, arXiv:1604.06174; bytes of a layer: memtrain/memory/estimate/activations.py,
`layer_boundary`
and `layer_backward`.
"""

from __future__ import annotations

from memtrain.memory.plan.settings import Settings
from memtrain.memory.strategies.base import ON_A_CPU, Strategy, StrategyContext, StrategyRequest, Updates
from memtrain.recipes.recipe import Recipe


def wish(recipe: Recipe) -> StrategyRequest:
    """On for every layer, unless the recipe names another distance."""
    memory = recipe.memory
    if memory.activation_checkpointing == "off" or memory.checkpoint_every not in ("auto", 1):
        return "off"
    if memory.streamed_layers == "on":
        return "off"
    return memory.activation_checkpointing


def changes(settings: Settings, case: StrategyContext) -> tuple[Updates, ...]:
    """Every layer."""
    return ({"checkpoint_every": 1},)


STRATEGY = Strategy(
    name="activation_checkpointing",
    axis="checkpointing",
    summary="every layer keeps only its input and recomputes the rest",
    saves="all activations of a layer but one tensor",
    costs="one more forward pass: 20-33 % of a step",
    measured=ON_A_CPU,
    is_exact=True,
    recovery="checkpointing",
    evidence="all layers twice",
    is_used=lambda settings: settings.checkpoint_every == 1,
    wish=wish,
    use_keys=lambda recipe: {"memory.activation_checkpointing": "on", "memory.checkpoint_every": 1},
    never_keys=lambda recipe: {"memory.activation_checkpointing": "off"},
    changes=changes,
    without={"checkpoint_every": 0, "offload": "none"},
)
