"""Boundary offloading: the inputs of checkpointed layers are offloaded to CPU until the backward pass.

When: checkpointing alone does not fit: long sequences, deep models. Saves: the input of every checkpointed
layer but the one at work. Costs: one copy out and one back for each, hidden behind the computation where the
bus is fast enough; as many bytes of pinned host memory; the plan keeps the inputs of
the last layers where that makes a step faster and fits. Exact: bytes are copied, not rounded. Refused:
without checkpointing (full offloading does that), and on a CPU, where host memory is the device's.

Source: Rajbhandari et al. 2021, arXiv:2104.07857, section 5.3 (checkpoints to the host); bit for bit by
tests/equal/test_checkpointing_and_offloading_are_exact.py.
"""

from __future__ import annotations

from memtrain.memory.plan.settings import Settings
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
    """Request of `memory.activation_offloading`; full offloading instead where nothing is checkpointed."""
    memory = recipe.memory
    if memory.activation_checkpointing == "off" and memory.streamed_layers != "on":
        return "off"
    return on_off(recipe.memory.activation_offloading)


def changes(settings: Settings, case: StrategyContext) -> tuple[Updates, ...]:
    """The layers' inputs: all, or all but the last quarter, half or three quarters."""
    asked, count = case.recipe.memory.offload_keep, case.facts.shape.num_layers
    if asked != "auto":
        return ({"offload": "boundaries", "offload_keep": asked},)
    shares = (0, count // 4, count // 2, 3 * count // 4) if settings.device == "cuda" else (0,)
    return tuple({"offload": "boundaries", "offload_keep": keep} for keep in dict.fromkeys(shares))


def refusal(case: StrategyContext) -> str | None:
    """A CPU has no other memory to move tensors to: there it only shows that nothing changes."""
    memory = case.recipe.memory
    is_asked = memory.activation_offloading == "on" or {"boundary_offloading", "full_offloading"} & {
        *memory.use
    }
    if case.facts.hardware.device == "cpu" and not is_asked:
        return "on a CPU the tensors are in host memory already"
    return None


STRATEGY = Strategy(
    name="boundary_offloading",
    axis="offloading",
    summary="inputs of checkpointed layers are offloaded to CPU",
    saves="one tensor of every checkpointed layer",
    costs="two copies over PCIe for each layer; pinned host memory",
    measured=f"{ON_A_CPU}, where the copies stay on the host; their time {ON_A_GPU}",
    is_exact=True,
    recovery="offloading",
    evidence="bytes that travel",
    is_used=lambda settings: settings.offload == "boundaries",
    wish=wish,
    use_keys=lambda recipe: {"memory.activation_offloading": "on", "memory.activation_checkpointing": "on"},
    never_keys=lambda recipe: {"memory.activation_offloading": "off"},
    changes=changes,
    without={"offload": "none", "offload_keep": 0},
    refusal=refusal,
    conflicts=(
        Conflict(
            "layers without checkpointing",
            "needs activation checkpointing; full_offloading moves the activations of other layers",
            when=lambda settings: settings.checkpoint_every == 0 and not settings.slice_tokens,
        ),
    ),
)
