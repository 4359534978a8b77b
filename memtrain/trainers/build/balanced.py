"""A method whose model's experts are evened: each step is counted before its first micro-batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from memtrain.memory.plan.settings import Settings
from memtrain.trainers.batches.collate import MicroBatch
from memtrain.trainers.build.expert_load import CountsExperts, micro_batch_of
from memtrain.trainers.losses.head.linear import Count, StepCount
from memtrain.trainers.losses.head.request import LogprobRequest
from memtrain.trainers.model.experts.load_balance import LoadBalance
from memtrain.trainers.model.heads.reward_head import RewardScorer
from memtrain.trainers.protocols.method import BeforeStep, Loss, Method, StepPreview, means_of
from memtrain.trainers.reference.reference import evaluating

AUX_LOSS = "router_aux_loss"
"""Name of the load-balance loss in the metrics; the loss is the method's own, without it."""


@dataclass(slots=True)
class Balanced:
    """The method, with the load-balance loss of a step beside its own; held-out rows have its own alone."""

    inner: Method
    balance: LoadBalance
    num_parts: StepCount = field(default_factory=StepCount)
    """Micro-batches of the step, of all ranks: each tells its share of the step's value."""

    def before_step(self, model: nn.Module, ahead: StepPreview) -> None:
        """Count which experts the tokens of a step go to: a pass without gradients over each micro-batch."""
        if isinstance(self.inner, BeforeStep):
            self.inner.before_step(model, ahead)
        if not torch.is_grad_enabled():
            return
        self.num_parts.write(len(ahead.micro_batches) * ahead.num_ranks, ahead.device)
        counting = self.balance.counting(ahead.device, num_ranks=ahead.num_ranks)
        # Without dropout: a draw of its own would send tokens elsewhere than the step's.
        with torch.no_grad(), evaluating(model), counting:
            for sequences in ahead.micro_batches:
                micro_batch = micro_batch_of(ahead.feed.micro_batch(sequences).to(ahead.device))
                self.balance.of_tokens(micro_batch.token_weights())
                _pass_through(model, micro_batch)

    def loss(self, model: nn.Module, micro_batch: Any, *, denominator: Count, want_stats: bool) -> Loss:
        """The method's own loss; its backward pass adds the gradient of the load-balance loss."""
        self.balance.of_tokens(micro_batch_of(micro_batch).token_weights())
        found = self.inner.loss(model, micro_batch, denominator=denominator, want_stats=want_stats)
        self.balance.beside(found.value)
        if not (want_stats and torch.is_grad_enabled()):
            return found
        share = self.balance.value * denominator / self.num_parts.value
        return found._replace(sums={**found.sums, AUX_LOSS: share})

    def means(self, sums: Mapping[str, float], count: float) -> dict[str, float]:
        """Means of the method itself, and the load-balance loss."""
        own = {name: value for name, value in sums.items() if name != AUX_LOSS}
        means = means_of(self.inner, own, count)
        return means | ({AUX_LOSS: sums[AUX_LOSS] / count} if AUX_LOSS in sums else {})


def balanced(method: Method, scorer: nn.Module, settings: Settings) -> Method:
    """The method as the plan wants the load of experts: evened by a loss, or left alone."""
    if not settings.router_aux_loss_coef:
        return method
    model: Any = scorer
    return Balanced(method, LoadBalance(model.model, settings.router_aux_loss_coef))


def own_method(method: Method) -> Method:
    """The method itself, without additions to its loss."""
    while isinstance(method, Balanced | CountsExperts):
        method = method.inner
    return method


def _pass_through(scorer: nn.Module, micro_batch: MicroBatch) -> None:
    """A pass of the backbone alone: the head is asked about no position."""
    inputs, none = micro_batch.model_inputs(), micro_batch.scored_index[:0]
    if isinstance(scorer, RewardScorer):
        scorer(inputs, none)
    else:
        scorer(inputs, none, LogprobRequest(micro_batch.targets[:0]))
