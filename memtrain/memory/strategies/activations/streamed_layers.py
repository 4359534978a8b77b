"""Streamed layers: each layer goes over a long row in slices, both ways, and keeps its input alone.

When: one long row is what does not fit, because of one layer's intermediates over all its tokens. Saves: what
a layer holds while it is recomputed, but for one slice of it and a few tensors of the row: input, gradients
of input and output, keys and values with their gradients. Costs: as much as checkpointing, and queries, keys
and values of a layer once more; the shorter the slices the more kernels. Exact: attention takes the keys
before a slice whole, gradients of keys are summed in float32; dropout draws its numbers by slice. Refused:
with attention that returns no log-sum-exp, for models whose layers mix tokens outside attention, with 8-bit
weights, under ZeRO-3, and with context parallelism by heads.

Source: StreamBP, arXiv:2506.03077; bytes of a layer: memtrain/memory/estimate/streamed_layers.py,
`streamed_backward`.
"""

from __future__ import annotations

from memtrain.memory.plan.settings import Settings
from memtrain.memory.rules.attention import MERGED, NOT_SLICED
from memtrain.memory.rules.compiled_layers import IN_PARTS
from memtrain.memory.rules.streamed_layers import (
    BY_HEADS,
    BY_MODULE,
    ENGINES,
    OF_ALL_TOKENS,
    mixing_layers,
)
from memtrain.memory.strategies.base import Conflict, Strategy, StrategyContext, StrategyRequest, Updates
from memtrain.recipes.recipe import Recipe

SLICES = (32_768, 8_192, 2_048)
"""Tokens of a slice that the search tries: below 2,048 kernels are too short to fill a GPU. Taste."""


def wish(recipe: Recipe) -> StrategyRequest:
    """Open unless the recipe sets it, or the kept part of a layer."""
    memory = recipe.memory
    if memory.streamed_layers != "auto":
        return "on" if memory.streamed_layers == "on" else "off"
    is_written = memory.activation_checkpointing != "auto" or memory.checkpoint_every != "auto"
    return "off" if is_written else "auto"


def changes(settings: Settings, case: StrategyContext) -> tuple[Updates, ...]:
    """Slices of the recipe's length, or of lengths that divide the longest sequence."""
    asked = case.recipe.memory.slice_tokens
    if asked != "auto":
        return ({"slice_tokens": asked},)
    longest = max(case.facts.profile.longest, default=0)
    shorter = tuple(tokens for tokens in SLICES if 2 * tokens <= longest)
    must = case.recipe.memory.streamed_layers == "on" or STRATEGY.name in case.recipe.memory.use
    return tuple({"slice_tokens": tokens} for tokens in shorter or (SLICES[-1:] if must else ()))


def refusal(case: StrategyContext) -> str | None:
    """Layers through which tokens reach each other beside attention, of a teacher too."""
    teacher = case.facts.teacher
    of_teacher = None if teacher is None else mixing_layers(teacher.config)
    return mixing_layers(case.facts.config) or (of_teacher and f"the teacher: {of_teacher}")


STRATEGY = Strategy(
    name="streamed_layers",
    axis="checkpointing",
    summary="each layer processes a row in slices, and keeps only its input",
    saves="activations of a layer while it is recomputed, but for one slice",
    costs="as checkpointing, and queries, keys and values once more",
    measured="[streamed layers, measured](streamed-layers.md#measured)",
    is_exact=True,
    recovery="slices",
    evidence="layers in parts",
    is_used=lambda settings: settings.slice_tokens > 0,
    wish=wish,
    use_keys=lambda recipe: {"memory.streamed_layers": "on"},
    never_keys=lambda recipe: {"memory.streamed_layers": "off"},
    changes=changes,
    without={"slice_tokens": 0, "offload": "none"},
    refusal=refusal,
    conflicts=(
        Conflict(
            "attention that is flex or transformers",
            NOT_SLICED,
            when=lambda settings: settings.attention not in MERGED,
        ),
        Conflict(
            "context parallelism by heads",
            BY_HEADS,
            when=lambda settings: settings.context_parallel > 1 and settings.context_by == "ulysses",
        ),
        Conflict("compiled layers", IN_PARTS, when=lambda settings: settings.compiled),
        Conflict(
            "router replay",
            "the sampler's choices are given to a router for a whole row at once",
            when=lambda settings: settings.router_replay,
        ),
        Conflict("8-bit weights", OF_ALL_TOKENS, when=lambda settings: settings.quantize == "8bit"),
        Conflict(
            "a load-balance loss of routers",
            "a router that sees slices of a row would count each for itself",
            when=lambda settings: settings.router_aux_loss_coef > 0,
        ),
        Conflict(
            "zero3",
            BY_MODULE,
            when=lambda settings: settings.num_processes > 1 and settings.engine not in ENGINES,
        ),
    ),
)
