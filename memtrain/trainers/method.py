"""What one training method brings to the loop; everything else is the loop's."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor, nn

from memtrain.trainers.data.collate import MicroBatch


class Loss(NamedTuple):
    """The loss of one micro-batch."""

    value: Tensor
    """Scalar, divided by the denominator of the whole step: micro-batches and ranks add up."""
    sums: dict[str, Tensor]
    """Sums for the metrics, detached scalars on the device; the loop divides them by `count`."""


class Method(Protocol):
    """A training method: how a micro-batch becomes a loss."""

    def loss(self, model: nn.Module, micro: MicroBatch, *, denominator: float, want_stats: bool) -> Loss:
        """The loss of `micro`; with `want_stats` also the sums that the metrics need."""
        ...
