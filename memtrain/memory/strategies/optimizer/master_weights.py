"""Master weights: float32 copies of half-precision weights, to which small updates are added unrounded.

When: wherever half-precision weights are trained, unless the recipe says otherwise: bfloat16 has 8
significant bits, and at usual learning rates most updates are smaller than half a step of a weight. Saves:
nothing; they are the price of learning, and `memory.allow: [pure_bfloat16]` is the saving. Costs: 4 bytes for
each trained weight, and 2 more for each moment, which is then float32 too. Not exact: the trained weights
differ with and without them; with them, they are those of float32. Refused: where the trained weights are
float32 already.

Source: Micikevicius et al. 2018, arXiv:1710.03740, section 3.1.
"""

from __future__ import annotations

from memtrain.memory.strategies.base import ON_A_CPU, Conflict, Strategy, StrategyContext, StrategyRequest
from memtrain.recipes.recipe import Recipe


def wish(recipe: Recipe) -> StrategyRequest:
    """Request of the recipe; `auto` is decided by rule."""
    wanted = recipe.optim.master_weights
    return "auto" if wanted == "auto" else "on" if wanted else "off"


def refusal(case: StrategyContext) -> str | None:
    """Reason where no half-precision weight is trained."""
    model, hardware = case.recipe.model, case.facts.hardware
    if model.dtype == "float32" or (
        model.dtype == "auto" and not (hardware.device == "cuda" and hardware.has_bfloat16)
    ):
        return "the weights are float32 already"
    if model.adapter is not None and not model.adapter.modules_to_save:
        return "the adapter that is trained is float32 already"
    return None


STRATEGY = Strategy(
    name="master_weights",
    axis="precision",
    summary="float32 copies of half-precision weights receive the updates",
    saves="no memory: it buys float32 updates for half-precision weights",
    costs="8 bytes for each trained weight, optimizer states included",
    measured=ON_A_CPU,
    is_exact=False,
    is_used=lambda settings: settings.master_weights,
    wish=wish,
    use_keys=lambda recipe: {"optim.master_weights": True},
    never_keys=lambda recipe: {"optim.master_weights": False},
    refusal=refusal,
    conflicts=(
        Conflict(
            "an adapter alone",
            "adapters are float32 already",
            when=lambda settings: settings.adapter is not None and not settings.adapter.modules_to_save,
        ),
        Conflict(
            "float32 weights",
            "the weights are float32 already",
            when=lambda settings: settings.dtype == "float32",
        ),
    ),
)
