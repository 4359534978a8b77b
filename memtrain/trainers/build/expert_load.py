"""A method whose metrics tell the tokens that went to each expert of a mixture, counted over whole steps."""

# L layers with experts, E experts

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from memtrain.trainers.batches.collate import MicroBatch
from memtrain.trainers.losses.head.linear import Count
from memtrain.trainers.model.experts.token_counts import TokenCounts, token_counts
from memtrain.trainers.protocols.events import Event, ExpertsEvent
from memtrain.trainers.protocols.method import (
    BeforeStep,
    Loss,
    Method,
    ReportsEvents,
    StepPreview,
    means_of,
)

LARGEST = "expert_load_max"
"""Metric: tokens of a layer's fullest expert over the mean of its experts, averaged over layers; 1 is even.
Counts are of the whole step: all its micro-batches, on all ranks."""
IDLE = "experts_idle"
"""Metric: share of the experts that got no token of the step."""
SENT, HELD_OUT = "expert_tokens", "held_out_expert_tokens"
"""Sums that go with them: tokens of each expert, of training and of held-out rows."""


@dataclass(slots=True)
class CountsExperts:
    """The method itself; where statistics are wanted, its passes are counted."""

    inner: Method
    counts: TokenCounts
    num_layers: int
    is_sliced: bool = False
    """A rank holds slices of rows: every token that it has counts, padding too."""
    sent_LE: NDArray[np.int64] | None = None
    """Tokens of the steps since the last event, of all ranks."""
    num_steps: int = field(default=0)

    def before_step(self, model: nn.Module, ahead: StepPreview) -> None:
        """Steps that the method itself takes ahead."""
        if isinstance(self.inner, BeforeStep):
            self.inner.before_step(model, ahead)

    def loss(self, model: nn.Module, micro_batch: Any, *, denominator: Count, want_stats: bool) -> Loss:
        """The method's own loss; with `want_stats` also the tokens that each expert was sent."""

        def own() -> Loss:
            return self.inner.loss(model, micro_batch, denominator=denominator, want_stats=want_stats)

        if not want_stats:
            return own()
        is_token_T = None if self.is_sliced else micro_batch_of(micro_batch).token_weights() > 0
        with self.counts.counting(is_token_T):
            found = own()
        counts_LE = self.counts.take()
        if counts_LE is None:
            return found
        name = SENT if torch.is_grad_enabled() else HELD_OUT
        return found._replace(sums={**found.sums, name: counts_LE.flatten().double()})

    def means(self, sums: Mapping[str, float], count: float) -> dict[str, float]:
        """Means of the method itself, and the experts' load; the tokens of a training step are noted."""
        by_name: dict[str, list[float]] = {SENT: [], HELD_OUT: []}
        own: dict[str, float] = {}
        for name, value in sums.items():
            kind = name.partition("/")[0]
            if kind in by_name:
                by_name[kind].append(value)
            else:
                own[name] = value
        metrics = means_of(self.inner, own, count)
        found = by_name[SENT] or by_name[HELD_OUT]
        if not found:
            return metrics
        sent_LE = np.array(found, np.int64).reshape(self.num_layers, -1)
        if by_name[SENT]:
            self.sent_LE = sent_LE if self.sent_LE is None else self.sent_LE + sent_LE
            self.num_steps += 1
        mean_L = np.maximum(sent_LE.mean(1), 1e-9)
        return metrics | {
            LARGEST: float((sent_LE.max(1) / mean_L).mean()),
            IDLE: float((sent_LE == 0).mean()),
        }

    def events(self, step: int) -> list[Event]:
        """Tokens of each expert in the logged steps since this was asked last."""
        inner = self.inner.events(step) if isinstance(self.inner, ReportsEvents) else []
        if self.sent_LE is None:
            return inner
        tokens = tuple(tuple(int(one) for one in layer) for layer in self.sent_LE)
        made = ExpertsEvent(step=step, steps=self.num_steps, tokens=tokens)
        self.sent_LE, self.num_steps = None, 0
        return [*inner, made]


def micro_batch_of(batch: Any) -> MicroBatch:
    """The policy's own rows of a batch of any method."""
    inside = getattr(batch, "answers", batch)
    return inside if isinstance(inside, MicroBatch) else inside.micro_batch


def with_expert_load(method: Method, scorer: nn.Module, *, is_sliced: bool = False) -> Method:
    """The method, counting where the model has experts. `is_sliced`: a rank holds slices of rows."""
    model: Any = scorer
    counts = token_counts(model.model)
    return method if counts is None else CountsExperts(method, counts, counts.num_layers, is_sliced)
