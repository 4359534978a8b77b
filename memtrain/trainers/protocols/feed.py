"""The protocol of feeds: sequences with their weights, and the steps made of them."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from memtrain.memory.plan.settings import Settings
from memtrain.trainers.data.packing.epochs import of_epoch
from memtrain.trainers.data.packing.step_order import (
    BatchSize,
    Epoch,
    longest_first_order,
    make_epoch,
    micro_batches,
)
from memtrain.trainers.protocols.events import DataEvent
from memtrain.trainers.protocols.method import Batch

Ints = NDArray[np.int64]


class Feed(Protocol):
    """Rows of one split as sequences that can enter the model."""

    @property
    def epoch_ptr(self) -> Ints:
        """[E + 1] where the sequences of each epoch begin that has rows of its own."""
        ...

    @property
    def tokens(self) -> Ints:
        """Tokens that each sequence puts into the model."""
        ...

    @property
    def weights(self) -> Ints:
        """Counts by which the loss is averaged, by sequence: loss tokens, or pairs."""
        ...

    @property
    def loss_tokens(self) -> Ints:
        """Loss tokens of each sequence."""
        ...

    def micro_batch(self, sequences: Ints) -> Batch:
        """The sequences as one forward pass takes them; none gives a micro-batch that teaches nothing."""
        ...

    def sample_prompt(self) -> Tensor:
        """int64 [T], tokens that the trained model may be asked to go on from: the shortest sequence's."""
        ...

    def data_event(self, split: str) -> DataEvent:
        """Effects of truncation and packing on the rows."""
        ...


def padded_tokens(feed: Feed, sequences: Ints, settings: Settings) -> int:
    """Tokens that some sequences put into the model at once, padding included."""
    tokens = feed.tokens[sequences]
    if not len(tokens):
        return 0
    return int(tokens.sum()) if settings.padding_free else len(tokens) * int(tokens.max())


@dataclass(frozen=True, slots=True)
class StepWork:
    """Work of one rank in an optimizer step."""

    step: int
    epoch: int
    is_last_of_epoch: bool
    sequences: Ints
    """Sequences of the whole step over all ranks, in their order."""
    micro_batches: tuple[Ints, ...]
    """Sequences of each micro-batch of this rank; as many as on any other rank."""
    denominator: float
    """Divisor of the losses of the whole step, over all ranks."""
    num_tokens: int
    """Tokens of the whole step over all ranks."""
    num_sequences: int
    num_loss_tokens: int | None = None
    """Loss tokens of the whole step, where the denominator counts something else."""
    passes: float = 0.0
    """Passes over the data when it is done: 1.5 in the middle of the second epoch."""
    of_epoch: tuple[int, int] = (0, 1)
    """(steps of the epoch that are done with it, all of them); 0 where it ends none of them."""


class StepSource(Protocol):
    """Source of the work of each optimizer step."""

    @property
    def feed(self) -> Feed:
        """Feed whose numbers the step's sequences are."""
        ...

    def work(self, step: int, *, rank: int, num_ranks: int) -> StepWork:
        """Work of `rank` in optimizer step number `step`; called by all ranks together."""
        ...


@dataclass(slots=True)
class Steps:
    """The optimizer steps of a run, each a pure function of its number: nothing to save, nothing to skip."""

    feed: Feed
    settings: Settings
    seed: int
    shuffle: bool
    _epochs: list[int] = field(default_factory=lambda: [0])
    """First step of each epoch looked at so far, and of the next."""
    _current: tuple[int, Epoch] | None = None

    def work(self, step: int, *, rank: int, num_ranks: int) -> StepWork:
        """Work of `rank` in optimizer step number `step`."""
        number, epoch = self._epoch_of(step)
        index = step - self._epochs[number]
        sequences = epoch.step(index)
        dealt = micro_batches(
            sequences,
            self.feed.tokens,
            num_ranks=num_ranks,
            micro_batch_size=self.settings.micro_batch_size,
            micro_tokens=self.settings.micro_tokens,
        )
        return StepWork(
            step=step,
            epoch=number,
            is_last_of_epoch=index == epoch.num_steps - 1,
            sequences=sequences,
            micro_batches=tuple(dealt[rank]),
            denominator=float(self.feed.weights[sequences].sum()),
            num_tokens=int(self.feed.tokens[sequences].sum()),
            num_loss_tokens=int(self.feed.loss_tokens[sequences].sum()),
            num_sequences=len(sequences),
            passes=number + (index + 1) / epoch.num_steps,
            of_epoch=(index + 1, epoch.num_steps),
        )

    def most_tokens(self, first: int, end: int) -> int:
        """Most tokens of a step from `first` to before `end`, in the pass that `first` is of."""
        number, epoch = self._epoch_of(first)
        begun = self._epochs[number]
        ptr = epoch.step_ptr[first - begun : min(epoch.num_steps, end - begun) + 1]
        tokens = self.feed.tokens[epoch.order[ptr[0] : ptr[-1]]]
        return int(np.add.reduceat(tokens, ptr[:-1] - ptr[0]).max())

    def _epoch_of(self, step: int) -> tuple[int, Epoch]:
        while step >= self._epochs[-1]:
            self._epochs.append(self._epochs[-1] + self._make(len(self._epochs) - 1).num_steps)
        number = bisect_right(self._epochs, step) - 1
        return number, self._make(number)

    def _make(self, number: int) -> Epoch:
        if self._current is None or self._current[0] != number:
            first, end = of_epoch(self.feed.epoch_ptr, number)
            made = make_epoch(
                self.feed.tokens[first:end],
                BatchSize(self.settings.batch_size, self.settings.batch_tokens),
                seed=self.seed,
                epoch=number,
                shuffle=self.shuffle,
                group_by_length=self.settings.group_by_length,
            )
            self._current = (number, Epoch(made.order + first, made.step_ptr))
        return self._current[1]


def eval_orders(feed: Feed) -> list[Ints]:
    """All sequences of each evaluation set, longest first.

    The sets of held-out rows are what epochs are of training rows: laid out apart.
    """
    bounds = feed.epoch_ptr
    return [
        first + longest_first_order(feed.tokens[first:end])
        for first, end in (of_epoch(bounds, number) for number in range(len(bounds) - 1))
    ]


def eval_micro_batches(
    feed: Feed, settings: Settings, sequences: Ints, *, rank: int, num_ranks: int
) -> list[Ints]:
    """Micro-batches of one rank in a pass over some `sequences` of held-out rows."""
    dealt = micro_batches(
        sequences,
        feed.tokens,
        num_ranks=num_ranks,
        micro_batch_size=settings.micro_batch_size,
        micro_tokens=settings.micro_tokens,
    )
    return dealt[rank]
