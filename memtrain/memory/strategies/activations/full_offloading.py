"""Full offloading: every tensor that a layer keeps waits in host memory, and nothing is computed again.

When: a fast bus and a slow device: what is moved costs less than computing it twice. Saves: all activations
but the current layers'. Costs: every kept byte crosses the bus twice, and as many bytes of pinned
host memory. Exact: bytes are copied, not rounded. Refused: with checkpointing (a checkpointed layer keeps one
tensor: boundary offloading moves that), and on a CPU.

Source: Ren et al. 2021, arXiv:2101.06840 (offloading to the host); bit for bit by
tests/equal/test_checkpointing_and_offloading_are_exact.py.
"""

from __future__ import annotations

from memtrain.memory.plan.engine_kinds import is_sharded
from memtrain.memory.plan.settings import Settings
from memtrain.memory.strategies.activations.boundary_offloading import refusal
from memtrain.memory.strategies.base import (
    ON_A_CPU,
    ON_A_GPU,
    Conflict,
    Strategy,
    StrategyContext,
    StrategyRequest,
    Updates,
    on_off,
)
from memtrain.recipes.recipe import Recipe


def wish(recipe: Recipe) -> StrategyRequest:
    """Request of `memory.activation_offloading`; boundary offloading instead where layers are
    checkpointed."""
    if recipe.memory.activation_checkpointing == "on":
        return "off"
    return on_off(recipe.memory.activation_offloading)


def changes(settings: Settings, case: StrategyContext) -> tuple[Updates, ...]:
    """Offload all kept activations."""
    return ({"offload": "all"},)


STRATEGY = Strategy(
    name="full_offloading",
    axis="offloading",
    summary="all activations of the layers are offloaded to CPU",
    saves="all activations but the current layers'",
    costs="every activation is copied over PCIe twice; pinned host memory",
    measured=f"{ON_A_CPU}, where the copies stay on the host; their time {ON_A_GPU}",
    is_exact=True,
    evidence="bytes that travel",
    is_used=lambda settings: settings.offload == "all",
    wish=wish,
    use_keys=lambda recipe: {"memory.activation_offloading": "on", "memory.activation_checkpointing": "off"},
    never_keys=lambda recipe: {"memory.activation_offloading": "off"},
    changes=changes,
    without={"offload": "none"},
    refusal=refusal,
    conflicts=(
        Conflict(
            "activation_checkpointing",
            "a checkpointed layer keeps only its input: boundary_offloading moves it",
        ),
        Conflict(
            "checkpoint_every_n",
            "recomputed tensors would be moved again; boundary_offloading moves the layer's input",
        ),
        Conflict(
            "compiled layers",
            "what a compiled layer keeps is chosen by the compiler, and was never moved",
            when=lambda settings: settings.compiled,
        ),
        Conflict("streamed_layers", "a streamed layer keeps only its input: boundary_offloading moves it"),
        Conflict(
            "weights in shards",
            "offloading the activations of a layer would offload the gathered weights too",
            when=is_sharded,
        ),
    ),
)
