"""Changes that lower the peak of a run that ran out of memory, and what the device needs for a peak."""

from __future__ import annotations

from memtrain.memory.estimate.peaks import estimate
from memtrain.memory.estimate.static import needed, usable
from memtrain.memory.explain.suggestions import Suggestion, suggestions
from memtrain.memory.model_shape.shape import ModelShape
from memtrain.memory.plan.heaviest_batch import HeaviestBatch
from memtrain.memory.plan.plan import PhasePeak
from memtrain.memory.plan.settings import Settings

BELOW = 0.9
"""A way out must be predicted to need this much less than the failed run, whose prediction was wrong."""

__all__ = ["needed", "ways_out"]


def ways_out(
    settings: Settings, shape: ModelShape, tokens: int, budget_bytes: int | None
) -> tuple[PhasePeak, list[Suggestion]]:
    """(the peak predicted for one micro-batch of `tokens` in one row, changes with a lower peak)."""
    batch = HeaviestBatch(1, tokens, tokens, tokens)
    predicted = estimate(settings, shape, batch).peak
    limit = int(predicted.num_bytes * BELOW)
    if budget_bytes is not None:
        limit = min(limit, usable(budget_bytes, settings))
    return predicted, list(suggestions(settings, shape, batch, limit))
