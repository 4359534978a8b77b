"""The tile of the chunked loss: a large one where there is room for it, on a GPU."""

from __future__ import annotations

from collections.abc import Callable

from memtrain.memory.estimate.pricing import PlannerInputs, Priced, price
from memtrain.memory.plan.sizes import LARGE_TILE, TILE_BYTES
from memtrain.memory.plan.units import MIB, gib
from memtrain.memory.rules.ledger import DecisionLog
from memtrain.recipes.recipe import Recipe

SIZES = (512 * MIB, 256 * MIB, 128 * MIB)
"""Sizes that are tried where the largest tile does not fit, the largest first."""
MOST_FREED = 4 * LARGE_TILE
"""Bytes that small tiles can free at most: tiles, sums as large, both in half precision, and margins."""
PATH = "memory.loss_chunk_size"


def with_small_tiles(priced: list[Priced], facts: PlannerInputs, budget: int, recipe: Recipe) -> list[Priced]:
    """Plans that do not fit with the largest tiles, again with small tiles where these may fit.

    Where none of them fits, the smallest of all is among them.
    """
    if recipe.memory.loss_chunk_size != "auto" or facts.hardware.device != "cuda":
        return []
    least = min(one.need_bytes for one in priced)
    beyond = max(budget, least) + MOST_FREED
    near = [one for one in priced if budget < one.need_bytes <= beyond and one.settings.loss == "chunked"]
    return [price(one.settings.model_copy(update={"loss_tile_bytes": TILE_BYTES}), facts) for one in near]


def with_larger_tile(
    chosen: Priced, facts: PlannerInputs, budget: int, has_room: Callable[[Priced], bool]
) -> Priced:
    """The plan with the largest tiles that fit and are no slower, where it has small ones.

    Called where the recipe leaves the size open, when everything else is chosen: tiles take what is left, and
    nothing is given up for them. A CPU's caches hold a small tile, and its kernels cost nothing to start.
    """
    settings = chosen.settings
    if settings.device != "cuda" or settings.loss != "chunked":
        return chosen
    for size in SIZES:
        if size <= settings.loss_tile_bytes:
            break
        larger = price(settings.model_copy(update={"loss_tile_bytes": size}), facts)
        if larger.need_bytes <= budget and larger.step_s <= chosen.step_s and has_room(larger):
            return larger
    return chosen


def explain_tile(ledger: DecisionLog, chosen: Priced) -> None:
    """Tell the size of the tiles where there are any."""
    settings = chosen.settings
    if settings.loss != "chunked" or settings.device != "cuda":
        return
    is_open = ledger.asked.recipe.memory.loss_chunk_size == "auto"
    is_larger = settings.loss_tile_bytes > TILE_BYTES
    why = "the LM head is read less often" if is_larger else "larger tiles do not fit, or are not faster"
    why = why if is_open else ""
    ledger.decide("loss_chunk_size", gib(settings.loss_tile_bytes), why, PATH)
