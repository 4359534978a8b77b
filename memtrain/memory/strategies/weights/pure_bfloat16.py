"""Pure bfloat16: weights and optimizer states in bfloat16 only, each update rounded to the nearest number.

When: the learning rate is large (1e-3 and above), or little is to be trained. Saves: 8 bytes for each trained
weight: the float32 copy, and half of both moments. Costs: the result. A bfloat16 has 8 significant bits,
so an update below half a step of its weight is lost: at a rate of 1e-5 at least 84 % of them, at 1e-6 98 %
(weights of standard deviation 0.02); and with a beta2 of 0.999 the second moment stops short, because it
moves by a thousandth. The plan tells the share at the recipe's rate. Not exact: far fewer updates are made.
Refused: where the trained weights are float32 already.

Source: Zamirai et al. 2020, arXiv:2010.06192, section 3 (weight updates rounded to nearest are what fails).
"""

from __future__ import annotations

from memtrain.memory.plan.engine_kinds import uses_zero
from memtrain.memory.plan.settings import Settings
from memtrain.memory.rules.precision import trains_half
from memtrain.memory.strategies.base import (
    ON_A_CPU,
    Conflict,
    Strategy,
    StrategyContext,
    StrategyRequest,
    Updates,
)
from memtrain.memory.strategies.optimizer.master_weights import refusal
from memtrain.recipes.recipe import Recipe


def wish(recipe: Recipe) -> StrategyRequest:
    """On when the recipe wants no float32 copies, else only where it is allowed."""
    return "on" if recipe.optim.master_weights is False else "allow"


def changes(settings: Settings, case: StrategyContext) -> tuple[Updates, ...]:
    """No copy of any weight."""
    return ({"master_weights": False},)


STRATEGY = Strategy(
    name="pure_bfloat16",
    axis="precision",
    summary="weights and optimizer states in bfloat16 only",
    saves="8 bytes for each trained weight",
    costs="most updates at usual learning rates are lost to rounding",
    measured=ON_A_CPU,
    is_exact=False,
    is_used=lambda settings: trains_half(settings.dtype, settings.adapter) and not settings.master_weights,
    wish=wish,
    use_keys=lambda recipe: {"optim.master_weights": False},
    changes=changes,
    without={"master_weights": True},
    refusal=refusal,
    conflicts=(
        Conflict(
            "float16",
            "weights of float16 lose small updates, and scaled gradients need float32 ones",
            when=lambda settings: settings.dtype == "float16",
        ),
        Conflict(
            "DeepSpeed's ZeRO",
            "the engine keeps float32 copies of bfloat16 weights in any case",
            when=uses_zero,
        ),
    ),
)
