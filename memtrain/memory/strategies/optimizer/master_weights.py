"""Master weights: float32 copies of half-precision weights, to which small updates are added unrounded.

When: asked for; full fine-tuning with small learning rates is closer to float32 with them. Saves: nothing;
they are the price of precision, and `memory.never: [master_weights]` is the saving. Costs: 4 bytes for each
trained weight, and 4 more for each moment, which is then float32 too. Not exact: with and without them other
weights are learnt. Refused: where the trained weights are float32 already.

Source: Micikevicius et al. 2018, arXiv:1710.03740, section 3.1.
"""

from __future__ import annotations

from memtrain.memory.plan.settings import Settings
from memtrain.memory.strategies.base import Case, Strategy, Updates


def changes(settings: Settings, case: Case) -> tuple[Updates, ...]:
    """Copies of every half-precision weight."""
    return ({"master_weights": True},)


def refusal(case: Case) -> str | None:
    """Where there is no half-precision weight that is trained."""
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
    says="float32 copies of half-precision weights",
    saves="nothing: the price of precision",
    costs="12 bytes for each trained weight, with its moments",
    is_exact=False,
    is_used=lambda settings: settings.master_weights,
    wish=lambda recipe: "on" if recipe.optim.master_weights else "off",
    use_keys=lambda recipe: {"optim.master_weights": True},
    never_keys=lambda recipe: {"optim.master_weights": False},
    changes=changes,
    without={"master_weights": False},
    refusal=refusal,
)
