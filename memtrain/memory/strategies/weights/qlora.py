"""QLoRA: the frozen weights in 4-bit NF4, rounded once, and LoRA beside them.

When: the weights alone do not fit in half precision. Saves: three quarters of the linear maps' bytes, beside
what LoRA saves. Costs: weights are widened for every product (10-30 % of a step), and what NF4 rounds away.
Not exact: another frozen model. Refused: on a GPU without bitsandbytes, and for training every weight.
Stacked experts, which bitsandbytes passes over, are packed in the same form by memtrain; on a CPU and in
shards of FSDP2 linear maps too.

Source: Dettmers et al. 2023, arXiv:2305.14314, section 3.
"""

from __future__ import annotations

from memtrain.memory.plan.engine_kinds import uses_zero
from memtrain.memory.plan.settings import Settings
from memtrain.memory.rules.precision import copies_beside
from memtrain.memory.strategies.base import (
    ON_A_GPU,
    Conflict,
    Strategy,
    StrategyContext,
    StrategyRequest,
    Updates,
)
from memtrain.memory.strategies.optimizer.base import without_bitsandbytes
from memtrain.recipes.recipe import Recipe
from memtrain.recipes.sections.model import Adapter


def wish(recipe: Recipe) -> StrategyRequest:
    """On when the recipe quantizes, else only where it is allowed."""
    return "on" if recipe.model.quantize != "none" else "allow"


def changes(settings: Settings, case: StrategyContext) -> tuple[Updates, ...]:
    """The recipe's adapter, or the default one, over 4-bit weights (8-bit where the recipe says so)."""
    model = case.recipe.model
    kind = model.quantize if model.quantize != "none" else "4bit"
    adapter = model.adapter or Adapter()
    return ({"adapter": adapter, "quantize": kind, **copies_beside(adapter, settings)},)


def refusal(case: StrategyContext) -> str | None:
    """A CPU packs by memtrain's own code."""
    return without_bitsandbytes(case) if case.facts.hardware.device == "cuda" else None


STRATEGY = Strategy(
    name="qlora",
    axis="adapter",
    summary="frozen weights in 4 bits; low-rank matrices beside them are trained",
    saves="three quarters of the weights; gradients and optimizer states of all weights",
    costs="weights are rounded, and dequantized for every product",
    measured=ON_A_GPU,
    is_exact=False,
    is_used=lambda settings: settings.quantize != "none",
    wish=wish,
    use_keys=lambda recipe: {"model.adapter": {"kind": "lora"}, "model.quantize": "4bit"},
    never_keys=lambda recipe: {"model.quantize": "none"},
    changes=changes,
    without={"quantize": "none"},
    refusal=refusal,
    conflicts=(
        Conflict(
            "every weight trained",
            "quantized weights are rounded once and get no gradient",
            when=lambda settings: settings.adapter is None,
        ),
        Conflict(
            "DeepSpeed's shards", "quantized weights are cut into shards by FSDP2 alone", when=uses_zero
        ),
    ),
)
