"""Smaller micro-batch: the rows of a step pass through the model a few at a time, their gradients are summed.

When: the activations of the step do not fit at once. Saves: activations and loss tiles in proportion. Costs:
more launches, smaller products, gradients that stay between micro-batches. Exact: each micro-batch is
weighted by its share of the step's loss tokens, so the sum is the step's. Refused: for losses that sort the
pairs of a step (aot), and below one sequence.

Source: Huang et al. 2019, arXiv:1811.06965, section 2 (gradients summed over micro-batches); the weighting is
held by tests/runs/test_same_step.py.
"""

from __future__ import annotations

from memtrain.memory.rules.ledger import DEFAULT_BATCH_SIZE
from memtrain.memory.strategies.base import ON_A_CPU, Strategy, StrategyContext, StrategyRequest
from memtrain.recipes.recipe import Recipe


def wish(recipe: Recipe) -> StrategyRequest:
    """Open unless the recipe names the micro-batch; a whole step is none."""
    train = recipe.train
    if train.micro_tokens != "auto":
        return "on"
    if train.micro_batch_size == "auto":
        return "auto"
    return "off" if train.micro_batch_size == (train.batch_size or DEFAULT_BATCH_SIZE) else "on"


def refusal(case: StrategyContext) -> str | None:
    """Losses over a whole step cannot be cut."""
    if case.recipe.ranks_the_batch:
        return "the loss sorts the pairs of a step, which must be one micro-batch"
    return None


STRATEGY = Strategy(
    name="smaller_micro_batch",
    axis="micro-batch",
    summary="a step's rows pass through the model a few at a time",
    saves="activations, in proportion",
    costs="more launches, smaller products",
    measured=ON_A_CPU,
    is_exact=True,
    recovery="split",
    evidence="several micro-batches",
    is_used=lambda settings: (
        settings.micro_tokens is not None or settings.micro_batch_size != settings.batch_size
    ),
    wish=wish,
    use_keys=lambda recipe: {"train.micro_batch_size": 1},
    never_keys=lambda recipe: {"train.micro_batch_size": recipe.train.batch_size or DEFAULT_BATCH_SIZE},
    refusal=refusal,
)
