"""A method whose rows are held by several ranks together: each brings an equal share of the same loss in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from memtrain.trainers.losses.head.linear import Count
from memtrain.trainers.protocols.method import BeforeStep, Loss, Method, StepPreview, means_of


@dataclass(frozen=True, slots=True)
class Shared:
    """The method on each of `num_sharing` ranks that hold the same rows.

    Their scorers answer about whole rows (`model/sliced_scoring.py`), so every one of them computes the same
    loss and the same sums; a share of each is what adds up to them over all ranks of the run. The gradients
    come out whole because `ContextRanks.sum` gives back as many times what it gets.
    """

    inner: Method
    num_sharing: int

    def loss(self, model: nn.Module, micro_batch: Any, *, denominator: Count, want_stats: bool) -> Loss:
        """Share of the loss, and of the sums, of this rank."""
        whole = self.inner.loss(model, micro_batch, denominator=denominator, want_stats=want_stats)
        sums = {name: value / self.num_sharing for name, value in whole.sums.items()}
        return whole._replace(value=whole.value / self.num_sharing, sums=sums)

    def before_step(self, model: nn.Module, ahead: StepPreview) -> None:
        """Run the method's own work before a step."""
        if isinstance(self.inner, BeforeStep):
            self.inner.before_step(model, ahead)

    def means(self, sums: Mapping[str, float], count: float) -> dict[str, float]:
        """Means of the method itself."""
        return means_of(self.inner, sums, count)


def shared(method: Method, num_sharing: int) -> Method:
    """The method as one of `num_sharing` ranks with the same rows follows it."""
    return method if num_sharing == 1 else Shared(method, num_sharing)
