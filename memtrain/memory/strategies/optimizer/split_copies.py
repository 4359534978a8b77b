"""Split copies: of each weight's float32 number the low 16 bits are kept, and the weight is its high half.

When: asked for, where the float32 copies of bfloat16 weights do not fit. Saves: 2 of their 4 bytes for each
trained weight. Costs: numbers are put together and taken apart in every step, in buckets of 256 MiB. Exact:
the float32 numbers are stepped as they are with whole copies; only one that lies exactly between two bfloat16
numbers, and was rounded down, is a unit in its last place (2^-24 of it) smaller in the next step. Refused:
where no bfloat16 weight is trained, under DeepSpeed's ZeRO, and for optimizers that step tensor by tensor
(muon, adafactor, 8-bit ones).

Source: Gupta et al. 2026 (FlashOptim), arXiv:2602.23349, section 3, here with 16 bits in place of 8.
"""

from __future__ import annotations

from memtrain.memory.plan.engine_kinds import uses_zero
from memtrain.memory.plan.settings import Settings
from memtrain.memory.strategies.base import Conflict, Strategy, StrategyContext, StrategyRequest, Updates
from memtrain.memory.strategies.optimizer.base import OF_COPIES
from memtrain.memory.strategies.optimizer.master_weights import refusal
from memtrain.recipes.recipe import Recipe


def wish(recipe: Recipe) -> StrategyRequest:
    """On when the recipe says so."""
    return "on" if recipe.optim.copies == "split" else "off"


def changes(settings: Settings, case: StrategyContext) -> tuple[Updates, ...]:
    """In place of whole copies."""
    return ({"copies": "split"},) if settings.master_weights else ()


STRATEGY = Strategy(
    name="split_copies",
    axis="copies",
    summary="only those bits of float32 copies are kept that the bfloat16 weights lack",
    saves="2 bytes for each trained weight",
    costs="float32 numbers are assembled in every step",
    measured="its losses: [what bfloat16 training learns](precision.md)",
    is_exact=True,
    evidence="bits beside the weights",
    is_used=lambda settings: settings.copies == "split",
    wish=wish,
    use_keys=lambda recipe: {"optim.copies": "split"},
    never_keys=lambda recipe: {"optim.copies": "float32"},
    changes=changes,
    without={"copies": "float32"},
    refusal=refusal,
    conflicts=(
        *OF_COPIES,
        Conflict("DeepSpeed's ZeRO", "it keeps its own float32 copies in any case", when=uses_zero),
    ),
)
