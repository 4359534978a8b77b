"""Common parts of the strategies that replace the recipe's optimizer."""

from __future__ import annotations

from collections.abc import Callable

from memtrain.memory.plan.engine_kinds import is_sharded
from memtrain.memory.plan.settings import Settings
from memtrain.memory.strategies.base import (
    Conflict,
    Strategy,
    StrategyContext,
    StrategyRequest,
    Updates,
    never_refused,
)
from memtrain.recipes.recipe import Recipe

OF_COPIES: tuple[Conflict, ...] = (
    Conflict(
        "weights without float32 numbers",
        "the strategy stores float32 numbers between steps",
        when=lambda settings: not settings.master_weights,
    ),
    Conflict(
        "optimizers that step tensor by tensor",
        "an interrupted step would lose some of its updates",
        when=lambda settings: settings.optimizer not in ("adamw", "sgd"),
    ),
)
"""Conflicts of every other form of float32 copies."""


def without_bitsandbytes(case: StrategyContext) -> str | None:
    """Reason that bitsandbytes, a package of CUDA kernels, is missing here; None where it is there."""
    if case.facts.hardware.device != "cuda":
        return "bitsandbytes computes on CUDA devices"
    if not case.facts.has("bitsandbytes"):
        return "bitsandbytes is not installed (pip install 'memtrain[quant]')"
    return None


def other_optimizer(
    kind: str,
    *,
    summary: str,
    saves: str,
    costs: str,
    measured: str,
    in_shards: str,
    refusal: Callable[[StrategyContext], str | None] = never_refused,
) -> Strategy:
    """The optimizer `kind` in place of the recipe's: on when the recipe names it, else only where allowed.

    `in_shards`: the reason why it steps no weights in shards.
    """

    def wish(recipe: Recipe) -> StrategyRequest:
        return "on" if recipe.optim.kind == kind else "allow"

    def changes(settings: Settings, case: StrategyContext) -> tuple[Updates, ...]:
        return ({"optimizer": kind},)

    return Strategy(
        name=kind,
        axis="optimizer",
        summary=summary,
        saves=saves,
        costs=costs,
        measured=measured,
        is_exact=False,
        is_used=lambda settings: settings.optimizer == kind,
        wish=wish,
        use_keys=lambda recipe: {"optim.kind": kind},
        changes=changes,
        without={"optimizer": "adamw"},
        refusal=refusal,
        conflicts=(Conflict("weights in shards", in_shards, when=is_sharded),),
    )
