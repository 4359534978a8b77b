"""A method whose metrics show how evenly the tokens of a step went to the experts of a mixture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from memtrain.trainers.model.experts.token_counts import TokenCounts, token_counts
from memtrain.trainers.protocols.method import BeforeStep, Loss, Method, StepPreview, means_of

LARGEST = "expert_load_max"
"""Metric: tokens of a layer's fullest expert over the mean of its experts, averaged over layers and
micro-batches; 1 is even."""
IDLE = "experts_idle"
"""Metric: share of a layer's experts that get no token of a micro-batch, averaged likewise."""
NUM_PARTS = "expert_load_parts"
"""Sum that goes with them: micro-batches that were counted."""


@dataclass(slots=True)
class CountsExperts:
    """The method itself; where statistics are wanted, its passes are counted."""

    inner: Method
    counts: TokenCounts

    def before_step(self, model: nn.Module, ahead: StepPreview) -> None:
        """Steps that the method itself takes ahead."""
        if isinstance(self.inner, BeforeStep):
            self.inner.before_step(model, ahead)

    def loss(self, model: nn.Module, micro_batch: Any, *, denominator: float, want_stats: bool) -> Loss:
        """The method's own loss; with `want_stats` also how evenly its tokens were sent."""
        self.counts.is_on = want_stats
        try:
            found = self.inner.loss(model, micro_batch, denominator=denominator, want_stats=want_stats)
        finally:
            self.counts.is_on = False
        counts_LE = self.counts.take()
        if counts_LE is None:
            return found
        mean_L = counts_LE.double().mean(1).clamp(min=1)
        largest = (counts_LE.amax(1) / mean_L).mean()
        metrics = {
            LARGEST: largest,
            IDLE: (counts_LE == 0).double().mean(),
            NUM_PARTS: torch.ones_like(largest),
        }
        return Loss(found.value, {**found.sums, **{name: one.float() for name, one in metrics.items()}})

    def means(self, sums: Mapping[str, float], count: float) -> dict[str, float]:
        """Means of the method itself, and of the experts' load."""
        own = {name: value for name, value in sums.items() if name not in (LARGEST, IDLE, NUM_PARTS)}
        metrics = means_of(self.inner, own, count)
        parts = sums.get(NUM_PARTS, 0.0)
        return metrics | ({name: sums[name] / parts for name in (LARGEST, IDLE)} if parts else {})


def with_expert_load(method: Method, scorer: nn.Module) -> Method:
    """The method, counting where the model has experts."""
    model: Any = scorer
    counts = token_counts(model.model)
    return method if counts is None else CountsExperts(method, counts)
