"""Two plans of one recipe: as resolved, and plain, without any memory strategy."""

from __future__ import annotations

from memtrain.memory.plan.plan import Plan
from memtrain.memory.planner.resolve import plain
from memtrain.trainers.data.packing.by_method import sequences_of


def plain_plan(plan: Plan) -> Plan:
    """The run of `plan` without any memory strategy, on the same rows in padded batches."""
    settings = plain(plan.settings, sequences_of(plan.recipe, plan.data, shares_prompts=False).profile)
    return plan.model_copy(update={"settings": settings, "prediction": plan.plain})
