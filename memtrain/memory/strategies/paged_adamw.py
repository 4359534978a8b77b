"""Paged AdamW: float32 moments in unified memory, which the driver moves to the host under pressure.

When: spikes of activations are what does not fit. Saves: the moments, where they are driven out; counted as
on the host. Costs: page faults in the step. Not exact: moments are float32 where the plain run has them in
the dtype of the weights. Refused: on a CPU, and without bitsandbytes.

Source: Dettmers et al. 2023, arXiv:2305.14314, section 3 (paged optimizers).
"""

from __future__ import annotations

from memtrain.memory.settings import Settings
from memtrain.memory.strategy import Case, Strategy, Updates, Wish
from memtrain.recipes.recipe import Recipe


def wish(recipe: Recipe) -> Wish:
    """On when it is the recipe's optimizer, else only where it is allowed."""
    return "on" if recipe.optim.kind == "paged_adamw" else "allow"


def changes(settings: Settings, case: Case) -> tuple[Updates, ...]:
    """This optimizer in place of the recipe's."""
    return ({"optimizer": "paged_adamw"},)


def refusal(case: Case) -> str | None:
    """bitsandbytes is a package of CUDA kernels."""
    if case.facts.hardware.device != "cuda":
        return "bitsandbytes computes on CUDA devices"
    if not case.facts.has("bitsandbytes"):
        return "bitsandbytes is not installed (pip install 'memtrain[quant]')"
    return None


STRATEGY = Strategy(
    name="paged_adamw",
    axis="optimizer",
    says="moments in memory that the driver moves to the host",
    saves="the moments, on the host under pressure",
    costs="page faults in the step; float32 moments on the host",
    is_exact=False,
    is_used=lambda settings: settings.optimizer == "paged_adamw",
    wish=wish,
    use_keys=lambda recipe: {"optim.kind": "paged_adamw"},
    changes=changes,
    without={"optimizer": "adamw"},
    refusal=refusal,
)
