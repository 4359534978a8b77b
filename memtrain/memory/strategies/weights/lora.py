"""LoRA: the weights are frozen, and two thin matrices beside each linear map are trained.

When: full fine-tuning does not fit, or is more than the task needs. Saves: gradients, moments and master
copies of all weights; the norms' inputs. Costs: less capacity than training every weight. Not exact:
another model is trained, and with a higher learning rate (about 2e-4). Refused: never.

Source: Hu et al. 2021, arXiv:2106.09685, section 4.1.
"""

from __future__ import annotations

from memtrain.memory.plan.engine_kinds import uses_zero
from memtrain.memory.plan.settings import Settings
from memtrain.memory.rules.precision import copies_beside
from memtrain.memory.strategies.base import (
    ON_A_CPU,
    Conflict,
    Strategy,
    StrategyContext,
    StrategyRequest,
    Updates,
)
from memtrain.recipes.recipe import Recipe
from memtrain.recipes.sections.model import Adapter


def wish(recipe: Recipe) -> StrategyRequest:
    """On when the recipe has an adapter, else only where it is allowed."""
    return "on" if recipe.model.adapter is not None else "allow"


def changes(settings: Settings, case: StrategyContext) -> tuple[Updates, ...]:
    """The recipe's adapter, or the default one."""
    adapter = case.recipe.model.adapter or Adapter()
    return ({"adapter": adapter, **copies_beside(adapter, settings)},)


STRATEGY = Strategy(
    name="lora",
    axis="adapter",
    summary="the weights are frozen; low-rank matrices beside them are trained",
    saves="gradients and optimizer states of all weights",
    costs="less capacity than training every weight",
    measured=ON_A_CPU,
    is_exact=False,
    is_used=lambda settings: settings.adapter is not None,
    wish=wish,
    use_keys=lambda recipe: {"model.adapter": {"kind": "lora"}},
    never_keys=lambda recipe: {"model.adapter": None},
    changes=changes,
    without={"adapter": None, "quantize": "none"},
    conflicts=(
        Conflict(
            "DeepSpeed's ZeRO in bfloat16",
            "it would round an adapter that is trained in float32",
            when=lambda settings: uses_zero(settings) and settings.dtype == "bfloat16",
        ),
    ),
)
