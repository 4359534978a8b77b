"""Paged 8-bit AdamW: 8-bit moments in unified memory, which the driver moves to the host.

When: neither moments nor room for them fit. Saves: the moments, where they are driven out; counted as on the
host. Costs: page faults in the step, on a quarter of the bytes. Not exact: moments are rounded to 256 levels.
Refused: on a CPU, and without bitsandbytes.

Source: Dettmers et al. 2021, arXiv:2110.02861, and 2023, arXiv:2305.14314, section 3.
"""

from __future__ import annotations

from memtrain.memory.settings import Settings
from memtrain.memory.strategy import Case, Strategy, Updates, Wish
from memtrain.recipes.recipe import Recipe


def wish(recipe: Recipe) -> Wish:
    """On when it is the recipe's optimizer, else only where it is allowed."""
    return "on" if recipe.optim.kind == "paged_adamw_8bit" else "allow"


def changes(settings: Settings, case: Case) -> tuple[Updates, ...]:
    """This optimizer in place of the recipe's."""
    return ({"optimizer": "paged_adamw_8bit"},)


def refusal(case: Case) -> str | None:
    """bitsandbytes is a package of CUDA kernels."""
    if case.facts.hardware.device != "cuda":
        return "bitsandbytes computes on CUDA devices"
    if not case.facts.has("bitsandbytes"):
        return "bitsandbytes is not installed (pip install 'memtrain[quant]')"
    return None


STRATEGY = Strategy(
    name="paged_adamw_8bit",
    axis="optimizer",
    says="8-bit moments in memory that the driver moves to the host",
    saves="the moments, on the host under pressure",
    costs="moments are rounded to 256 levels; page faults in the step",
    is_exact=False,
    is_used=lambda settings: settings.optimizer == "paged_adamw_8bit",
    wish=wish,
    use_keys=lambda recipe: {"optim.kind": "paged_adamw_8bit"},
    changes=changes,
    without={"optimizer": "adamw"},
    refusal=refusal,
)
