"""Adafactor: second moments as a row and a column for each matrix, no first moments.

When: the moments of all weights do not fit. Saves: nearly all of the optimizer's bytes. Costs: a float32 copy
of one tensor and its update at a time. Not exact: another optimizer: its learning rate is scaled and clipped
differently. Refused: never.

Source: Shazeer and Stern 2018, arXiv:1804.04235, algorithm 4.
"""

from __future__ import annotations

from memtrain.memory.settings import Settings
from memtrain.memory.strategy import Case, Strategy, Updates, Wish
from memtrain.recipes.recipe import Recipe


def wish(recipe: Recipe) -> Wish:
    """On when it is the recipe's optimizer, else only where it is allowed."""
    return "on" if recipe.optim.kind == "adafactor" else "allow"


def changes(settings: Settings, case: Case) -> tuple[Updates, ...]:
    """This optimizer in place of the recipe's."""
    return ({"optimizer": "adafactor"},)


def refusal(case: Case) -> str | None:
    """It runs everywhere."""
    return None


STRATEGY = Strategy(
    name="adafactor",
    axis="optimizer",
    says="second moments as a row and a column for each matrix",
    saves="nearly all of the moments",
    costs="another optimizer, with other weights at the end",
    is_exact=False,
    is_used=lambda settings: settings.optimizer == "adafactor",
    wish=wish,
    use_keys=lambda recipe: {"optim.kind": "adafactor"},
    changes=changes,
    without={"optimizer": "adamw"},
    refusal=refusal,
)
