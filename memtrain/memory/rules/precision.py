"""Precision of trained weights: the weights with float32 copies, and updates that rounding would lose."""

from __future__ import annotations

import math
from collections.abc import Mapping

from memtrain.memory.plan.settings import Settings
from memtrain.memory.rules.ledger import DecisionLog
from memtrain.recipes.recipe import Recipe
from memtrain.recipes.sections.model import Adapter

PATH = "optim.master_weights"
SIGNIFICAND_BITS: Mapping[str, int] = {"bfloat16": 8, "float16": 11}
"""Bits of a half-precision number's significand, the implicit one included."""
USUAL_STD = 0.02
"""Standard deviation of a matrix where a configuration has no `initializer_range`: transformers' default."""


WITH_COPIES: Mapping[str, object] = {"master_weights": True}
WITHOUT_COPIES: Mapping[str, object] = {"master_weights": False}
"""Settings of a run whose updates go to float32 copies, and of one without."""


def precision_settings(recipe: Recipe, dtype: str) -> dict[str, object]:
    """The precision of the weights, and of their updates."""
    return {"dtype": dtype, **(WITH_COPIES if keeps_masters(recipe, dtype) else WITHOUT_COPIES)}


def copies_beside(adapter: Adapter, settings: Settings) -> Mapping[str, object]:
    """Settings of the updates of an adapter."""
    keeps = settings.master_weights and trains_half(settings.dtype, adapter)
    return WITH_COPIES if keeps else WITHOUT_COPIES


def trains_half(dtype: str, adapter: Adapter | None) -> bool:
    """Whether half-precision weights are trained: adapters are float32, copies of whole modules are not."""
    return dtype != "float32" and (adapter is None or bool(adapter.modules_to_save))


def keeps_masters(recipe: Recipe, dtype: str) -> bool:
    """Whether float32 copies take the updates: wherever half-precision weights are trained, unless asked."""
    wanted = recipe.optim.master_weights
    return trains_half(dtype, recipe.model.adapter) if wanted == "auto" else wanted


def refuse_precision(ledger: DecisionLog, dtype: str) -> None:
    """Refuse keys on weights and moments that this run does not have."""
    optim = ledger.asked.recipe.optim
    keeps = keeps_masters(ledger.asked.recipe, dtype)
    if optim.copies in ("split", "stochastic") and not keeps:
        what = f"optim.copies {optim.copies} is for bfloat16 weights stepped in float32, and none are here"
        ledger.refuse(what, "optim.copies", "remove it")
    if optim.compressed_moments and optim.kind != "adamw":
        what = f"optim.compressed_moments needs AdamW, and optim.kind is {optim.kind}"
        ledger.refuse(what, "optim.compressed_moments", "remove it, or set optim.kind: adamw")


def explain_masters(
    ledger: DecisionLog, settings: Settings, config: Mapping[str, object], gained: str
) -> None:
    """Note the form of updates of half-precision weights; `gained`: bytes saved by pure bfloat16."""
    if not trains_half(settings.dtype, settings.adapter):
        return
    recipe = ledger.asked.recipe
    lost = lost_words(recipe, settings, config)
    if settings.master_weights:
        ledger.decide(
            "master_weights", "on", f"float32 copies receive the updates; without them {lost}", PATH
        )
        return
    path = PATH if recipe.optim.master_weights is False else "memory.allow"
    ledger.decide("master_weights", "off", f"{lost}; {gained}", path)


def lost_words(recipe: Recipe, settings: Settings, config: Mapping[str, object]) -> str:
    """The share of updates that rounding to the weights' precision loses at the recipe's learning rate."""
    if settings.optimizer == "sgd":
        return f"{settings.dtype} rounds small updates away (updates of sgd depend on the gradients)"
    std = usual_std(config)
    share = lost_share(recipe.optim.lr, std, SIGNIFICAND_BITS[settings.dtype])
    return (
        f"rounding to {settings.dtype} loses {share:.1%} of updates as large as optim.lr "
        f"{recipe.optim.lr:g}, and more of smaller ones (weights of std {std:g})"
    )


def usual_std(config: Mapping[str, object]) -> float:
    """Standard deviation of the model's matrices, as its configuration initializes them."""
    found = config.get("initializer_range")
    return float(found) if isinstance(found, int | float) and found > 0 else USUAL_STD


def lost_share(update: float, std: float, bits: int = SIGNIFICAND_BITS["bfloat16"]) -> float:
    """Share of normally distributed weights with `bits` that an update of one size leaves where they are.

    Numbers between 2^e and 2^(e+1) lie 2^(e-bits+1) apart, and the nearest is taken: an update below half of
    that is lost. So it is lost on every weight of at least 2^e with e the smallest for which 2^(e-bits) >
    update; of weights with standard deviation `std` that is erfc(2^e / (std sqrt 2)). AdamW's updates are at
    most about as large as the learning rate, so the share of what is lost in training is at least this one.

    Source: IEEE 754 rounding to nearest; measured in tests/memory/rules/test_precision.py.
    """
    smallest = math.floor(math.log2(update)) + bits + 1
    return math.erfc(2.0**smallest / (std * math.sqrt(2)))
