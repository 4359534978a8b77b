"""The protocol of a training method; everything else is the loop's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from memtrain.trainers.losses.head.linear import Count
from memtrain.trainers.protocols.events import Event

Ints = NDArray[np.int64]


class Batch(Protocol):
    """A micro-batch of a method."""

    @property
    def num_tokens(self) -> int:
        """Tokens that are not padding."""
        ...

    @property
    def num_loss_tokens(self) -> int:
        """Count by which the loss is averaged: loss tokens, pairs, or answers."""
        ...

    def to(self, device: torch.device | str) -> Any:
        """The same batch with its tensors on `device`."""
        ...


class Loss(NamedTuple):
    """The loss of one micro-batch."""

    value: Tensor
    """Scalar, divided by the denominator of the whole step: micro-batches and ranks add up."""
    sums: dict[str, Tensor]
    """Sums for the metrics, detached, on the device: scalars, which the loop divides by `count`; of a vector
    the loop makes a sum of each number, `name/0` and so on."""
    seen: tuple[Tensor, ...] = ()
    """Tensors of the pass that the method is shown after it (`SeesPasses`)."""


class Method(Protocol):
    """A training method: how a micro-batch becomes a loss."""

    def loss(self, model: nn.Module, micro_batch: Any, *, denominator: Count, want_stats: bool) -> Loss:
        """The loss of `micro_batch`; with `want_stats` also the sums that the metrics need."""
        ...


@dataclass(frozen=True, slots=True)
class StepPreview:
    """An optimizer step, or a pass over the held-out rows, before its first micro-batch."""

    feed: Any
    """The feed of the method."""
    sequences: Ints
    """Sequences of all ranks, in their order."""
    micro_batches: Sequence[Ints]
    """Sequences of this rank's micro-batches."""
    device: torch.device
    num_ranks: int
    num_sharing: int = 1
    """Number of ranks that hold the same rows as this one, itself counted."""
    is_trial: bool = False
    """The sequences were put together to try memory, and are no step's: no reference was asked for them."""


@runtime_checkable
class BeforeStep(Protocol):
    """A method whose loss depends on the whole step."""

    def before_step(self, model: nn.Module, ahead: StepPreview) -> None:
        """Compute the statistics that the coming micro-batches' losses need; called by all ranks together."""
        ...


@runtime_checkable
class SeesPasses(Protocol):
    """A method that keeps tensors of its passes. A pass that is replayed calls no method: what it keeps is in
    its loss."""

    def saw(self, *seen: Tensor) -> None:
        """Take `Loss.seen` of a pass; they are the method's own."""
        ...


@runtime_checkable
class ReportsMeans(Protocol):
    """A method whose sums are not all means over `count`."""

    def means(self, sums: Mapping[str, float], count: float) -> dict[str, float]:
        """Metrics from sums over all micro-batches and ranks."""
        ...


@runtime_checkable
class ReportsEvents(Protocol):
    """A method that has more to tell than numbers of a step."""

    def events(self, step: int) -> list[Event]:
        """Events since this was asked last, for the metrics; asked on every rank before a save."""
        ...


@runtime_checkable
class TracksPolicy(Protocol):
    """A method that keeps something in step with the weights, and in the checkpoints."""

    def stepped(self, num_steps: int) -> None:
        """Called when `num_steps` optimizer steps are made."""
        ...

    def kept_state(self) -> dict[str, Tensor]:
        """Tensors that a checkpoint must hold; filled in place when a run goes on."""
        ...


def means_of(method: Method, sums: Mapping[str, float], count: float) -> dict[str, float]:
    """The means that are told of sums over `count`."""
    if isinstance(method, ReportsMeans):
        return method.means(sums, count)
    return {name: value / count for name, value in sums.items()}
