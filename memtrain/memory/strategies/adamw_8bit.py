"""8-bit AdamW: the moments in blocks of 8 bits with a scale each.

When: the moments of all weights do not fit, and the host is to be left alone. Saves: three quarters of
float32 moments, half of bfloat16 ones. Costs: next to nothing. Not exact: moments are rounded to 256 levels,
so other weights are learnt; losses are reported to be on a par. Refused: on a CPU, and without bitsandbytes.

Source: Dettmers et al. 2021, arXiv:2110.02861, section 2.
"""

from __future__ import annotations

from memtrain.memory.settings import Settings
from memtrain.memory.strategy import Case, Strategy, Updates, Wish
from memtrain.recipes.recipe import Recipe


def wish(recipe: Recipe) -> Wish:
    """On when it is the recipe's optimizer, else only where it is allowed."""
    return "on" if recipe.optim.kind == "adamw_8bit" else "allow"


def changes(settings: Settings, case: Case) -> tuple[Updates, ...]:
    """This optimizer in place of the recipe's."""
    return ({"optimizer": "adamw_8bit"},)


def refusal(case: Case) -> str | None:
    """bitsandbytes is a package of CUDA kernels."""
    if case.facts.hardware.device != "cuda":
        return "bitsandbytes computes on CUDA devices"
    if not case.facts.has("bitsandbytes"):
        return "bitsandbytes is not installed (pip install 'memtrain[quant]')"
    return None


STRATEGY = Strategy(
    name="adamw_8bit",
    axis="optimizer",
    says="moments in 8 bits with a scale for each block",
    saves="half of bfloat16 moments, three quarters of float32 ones",
    costs="moments are rounded to 256 levels",
    is_exact=False,
    is_used=lambda settings: settings.optimizer == "adamw_8bit",
    wish=wish,
    use_keys=lambda recipe: {"optim.kind": "adamw_8bit"},
    changes=changes,
    without={"optimizer": "adamw"},
    refusal=refusal,
)
