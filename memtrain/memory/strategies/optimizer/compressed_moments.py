"""Compressed moments: both of AdamW's in 8 bits between steps, in float32 while a bucket is stepped.

When: the moments do not fit, or are not to wait on the host. Saves: 5.75 of their 8 bytes for each trained
weight. Costs: a bucket of them is expanded and compressed in every step. Not exact: the first moment is
rounded to 255 levels of a companded scale for each 32 numbers, the root of the second to 255 even ones; what
that costs in held-out loss is measured in docs/benchmarks.md. Refused: for other optimizers than AdamW, with
moments on the host, over shards, and in pure bfloat16.

Source: Gupta et al. 2026 (FlashOptim), arXiv:2602.23349, section 3 (companded moments); scales are float32
here. On any device, in plain torch, where 8-bit AdamW of bitsandbytes needs CUDA.
"""

from __future__ import annotations

from memtrain.memory.plan.engine_kinds import is_sharded
from memtrain.memory.plan.settings import Settings
from memtrain.memory.rules.precision import trains_half
from memtrain.memory.strategies.base import Conflict, Strategy, StrategyContext, StrategyRequest, Updates
from memtrain.recipes.recipe import Recipe


def wish(recipe: Recipe) -> StrategyRequest:
    """On when the recipe says so, else only where it is allowed."""
    return "on" if recipe.optim.compressed_moments else "allow"


def changes(settings: Settings, case: StrategyContext) -> tuple[Updates, ...]:
    """Both moments of AdamW."""
    return ({"compressed_moments": True},) if settings.optimizer == "adamw" else ()


def refusal(case: StrategyContext) -> str | None:
    """Reason where the recipe's optimizer has other moments."""
    kind = case.recipe.optim.kind
    return None if kind == "adamw" else f"{kind} has other states"


STRATEGY = Strategy(
    name="compressed_moments",
    axis="moments",
    summary="AdamW's moments in 8 bits between steps",
    saves="5.75 bytes for each trained weight",
    costs="optimizer states are rounded to 255 levels, with a scale for each 32",
    measured="its losses: [what bfloat16 training learns](precision.md)",
    is_exact=False,
    evidence="moments in 8 bits",
    is_used=lambda settings: settings.compressed_moments,
    wish=wish,
    use_keys=lambda recipe: {"optim.compressed_moments": True},
    never_keys=lambda recipe: {"optim.compressed_moments": False},
    changes=changes,
    without={"compressed_moments": False},
    refusal=refusal,
    conflicts=(
        Conflict(
            "other optimizers", "the states are AdamW's", when=lambda settings: settings.optimizer != "adamw"
        ),
        Conflict(
            "bfloat16 weights without float32 numbers",
            "compressed states are expanded to float32, and step float32 weights",
            when=lambda settings: (
                trains_half(settings.dtype, settings.adapter) and not settings.master_weights
            ),
        ),
        Conflict("optimizer_offload", "compressed states are small enough to stay on the device"),
        Conflict(
            "weights in shards",
            "32 numbers have a scale in common, and a rank's rows may begin between them",
            when=is_sharded,
        ),
    ),
)
