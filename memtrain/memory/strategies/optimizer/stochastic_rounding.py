"""Stochastic rounding: no float32 copies; each stepped weight goes to one of its two neighbours at random.

When: the copies do not fit, and pure bfloat16 would lose the updates. Saves: 4 bytes for each trained weight
(moments stay float32). Costs: noise: a weight moves a whole step of bfloat16 or not at all, and is right on
average. Not exact: the trained weights differ; what that costs in held-out loss is measured in
docs/benchmarks.md. Refused: where no bfloat16 weight is trained, over shards, and for optimizers that step
tensor by tensor (muon, adafactor, 8-bit ones).

Source: Ozkara et al. 2025, arXiv:2502.20566, section 2.
"""

from __future__ import annotations

from memtrain.memory.plan.engine_kinds import is_sharded
from memtrain.memory.plan.settings import Settings
from memtrain.memory.strategies.base import Conflict, Strategy, StrategyContext, StrategyRequest, Updates
from memtrain.memory.strategies.optimizer.base import OF_COPIES
from memtrain.memory.strategies.optimizer.master_weights import refusal
from memtrain.recipes.recipe import Recipe


def wish(recipe: Recipe) -> StrategyRequest:
    """On when the recipe says so, else only where it is allowed."""
    return "on" if recipe.optim.copies == "stochastic" else "allow"


def changes(settings: Settings, case: StrategyContext) -> tuple[Updates, ...]:
    """In place of copies of any kind."""
    return ({"copies": "stochastic"},) if settings.master_weights else ()


STRATEGY = Strategy(
    name="stochastic_rounding",
    axis="copies",
    summary="weights without float32 copies, rounded up or down at random",
    saves="4 bytes for each trained weight",
    costs="noise in every step, right on average",
    measured="its losses: [what bfloat16 training learns](precision.md)",
    is_exact=False,
    evidence="weights without copies",
    is_used=lambda settings: settings.copies == "stochastic",
    wish=wish,
    use_keys=lambda recipe: {"optim.copies": "stochastic"},
    changes=changes,
    without={"copies": "float32"},
    refusal=refusal,
    conflicts=(
        *OF_COPIES,
        Conflict(
            "weights in shards",
            "draws belong to whole weights: every rank's rows would be rounded by the same ones",
            when=is_sharded,
        ),
    ),
)
