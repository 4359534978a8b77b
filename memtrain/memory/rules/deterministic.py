"""Sums in one order: what a GPU cannot compute so, and is refused with `train.deterministic`."""

from __future__ import annotations

from memtrain.memory.estimate.pricing import PlannerInputs
from memtrain.memory.model_shape.length_rules import own_layers
from memtrain.memory.rules.ledger import DecisionLog
from memtrain.recipes.recipe import Recipe

PATH = "train.deterministic"
NOT_ON_CUDA = "set it to false, or cluster.device: cpu"


def decide_deterministic(ledger: DecisionLog, facts: PlannerInputs) -> bool:
    """Whether every sum has one order; reported where the recipe asks.

    Refused on CUDA: completions, and layers of other kinds than attention.
    """
    recipe = ledger.asked.recipe
    if not recipe.train.deterministic:
        return False
    if facts.hardware.device == "cpu":
        ledger.decide("deterministic", True, "a CPU's sums have one order for a number of threads", PATH)
        return True
    if written := _written(recipe):
        what = f"{written} are drawn by sums over the vocabulary, which CUDA makes in no fixed order"
        ledger.refuse(f"{PATH}: {what}", PATH, NOT_ON_CUDA)
    if kinds := own_layers(facts.config):
        what = f"kernels of {', '.join(kinds)} layers add up gradients in no fixed order"
        ledger.refuse(f"{PATH}: {what}", PATH, NOT_ON_CUDA)
    ledger.decide("deterministic", True, "sums have one order; backward passes of attention are slower", PATH)
    return True


def _written(recipe: Recipe) -> str:
    """Name of what the model writes in the run; empty where it writes nothing."""
    if recipe.writes_completions:
        return f"completions of {recipe.method}"
    return "answers of eval.samples and eval.metrics" if recipe.eval.samples or recipe.eval.metrics else ""
