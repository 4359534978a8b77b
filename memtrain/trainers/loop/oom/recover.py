"""Running out of memory without losing the run: the step again in smaller parts, then with more strategies.

Losses are divided by the denominator of the whole step, so the parts of a micro-batch add up to its loss and
gradients: the same up to the rounding of sums. Dropout is drawn anew for each part, so with dropout the step
is another sample of the same distribution; the note says so.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from memtrain.errors import MemtrainError
from memtrain.memory.plan.settings import Settings
from memtrain.memory.plan.units import MIB, gib
from memtrain.memory.rules.weights_offload import moved
from memtrain.trainers.build.step import Failure, Part
from memtrain.trainers.protocols.feed import Feed, padded_tokens
from memtrain.trainers.protocols.position import TrainState
from memtrain.trainers.runtime.oom_errors import attempt, free
from memtrain.trainers.runtime.ranks import Ranks

Ints = NDArray[np.int64]
Made = TypeVar("Made")

LEAST_SLICE_TOKENS = 256
"""Shortest slice of a streamed layer that is tried; below, kernels have hardly any work. Taste."""

FIRST_SLICE_TOKENS = 4096
"""Slices of layers that were not streamed before. Taste."""

LEAST_TILE_BYTES = MIB
"""Smallest tile of logits that is tried; below, launches take all the time. Taste."""


class Exhausted(Exception):
    """Memory ran out, and nothing is left to try."""

    def __init__(self, failure: Failure) -> None:
        super().__init__("out of memory")
        self.failure = failure


@dataclass(slots=True)
class Recovery:
    """Recovery from exhausted memory, with the limits found so far.

    Every rank has one; they learn the same, because they agree on every failure of a step.
    """

    settings: Settings
    """Settings now: strategies that were switched on included."""
    position: TrainState
    """State in which the limits are kept, so that a run that is continued has them too."""
    post_mortem: Callable[[Exhausted], MemtrainError]
    """Explains the end of a run, and the changes that would avoid it."""
    treat: Callable[[Settings], None] = lambda settings: None
    """Makes the model obey changed settings."""
    emit: Callable[[str], None] = lambda text: None
    """Takes notes."""
    has_dropout: bool = False
    eval_limit: int | None = None
    """Limit like `TrainState.micro_limit`, for passes without gradients."""
    failures: list[Failure] = field(default_factory=list)

    @property
    def is_on(self) -> bool:
        """Whether anything may be done."""
        return bool(self.settings.recovery)

    def resume(self) -> None:
        """Switch on the strategies that the run had on before it was continued."""
        for name in self.position.switched_on:
            self._switch(name)

    def divide(self, feed: Feed, micro_batches: Sequence[Ints]) -> list[Part]:
        """The micro-batches of a step, split where as heavy as a failed micro-batch."""
        parts: list[Part] = []
        for index, sequences in enumerate(micro_batches):
            pieces = list(self._below(feed, sequences, self.position.micro_batch_limit))
            parts += [Part(piece, index, number) for number, piece in enumerate(pieces)]
        return parts

    def smaller(self, feed: Feed, micro_batches: Sequence[Ints], failure: Failure) -> list[Part]:
        """The micro-batches of a step as it is tried next, after `failure`: split, or with the next strategy.

        Raises: Exhausted when nothing is left to try.
        """
        self.learn(failure)
        return self.divide(feed, micro_batches)

    def each(
        self, feed: Feed, micro_batches: Sequence[Ints], act: Callable[[Ints], Made], *, ranks: Ranks
    ) -> list[Made]:
        """Results of `act` for each micro-batch, or for its parts, in a pass without gradients and
        collectives.

        Called by all ranks together. Raises: Exhausted, on every rank.
        """
        spent: Exhausted | None = None
        made: list[Made] = []
        try:
            made = list(self._scored(feed, micro_batches, act))
        except Exhausted as error:
            spent = error
        if self.is_on and ranks.any(spent is not None):
            raise spent or Exhausted(Failure(0, is_single=True))
        return made

    def _scored(
        self, feed: Feed, micro_batches: Sequence[Ints], act: Callable[[Ints], Made]
    ) -> Iterator[Made]:
        waiting = deque(micro_batches)
        while waiting:
            sequences = waiting.popleft()
            pieces = list(self._below(feed, sequences, self.eval_limit))
            if len(pieces) > 1:
                waiting.extendleft(reversed(pieces))
                continue
            made, is_whole = attempt(lambda sequences=sequences: act(sequences), is_on=self.is_on)
            if is_whole:
                assert made is not None
                yield made
                continue
            free()
            self._learn_of_evaluation(self._failure(feed, sequences))
            waiting.appendleft(sequences)

    def learn(self, failure: Failure) -> None:
        """Split as heavy micro-batches from now on, or switch on the next strategy, and say so.

        Raises: Exhausted when neither is left.
        """
        self.failures.append(failure)
        allowed = self.settings.recovery
        text = f"ran out of memory with {failure.load:,} tokens in a pass of step {self.position.step + 1}: "
        if "split" in allowed and not failure.is_single:
            self.position.micro_batch_limit = failure.load
            text += "the step was repeated, with micro-batches of this size split from now on"
            if self.has_dropout:
                text += " (dropout masks are drawn again for each part)"
        else:
            name = next_strategy(self.settings)
            if name is None:
                raise Exhausted(failure)
            self._switch(name)
            self.position.switched_on = [*self.position.switched_on, name]
            text += f"{OOM_STEPS[name](self.settings)}, and the step was repeated"
        self.position.num_recoveries += 1
        self.emit(text)

    def _learn_of_evaluation(self, failure: Failure) -> None:
        if failure.is_single and not _can(self.settings, "loss_tile"):
            raise Exhausted(failure)
        if failure.is_single:
            self._switch("loss_tile")
        elif "split" not in self.settings.recovery:
            raise Exhausted(failure)
        else:
            self.eval_limit = failure.load
        self.position.num_recoveries += 1
        self.emit(
            f"evaluation ran out of memory with {failure.load:,} tokens in a pass, and uses smaller "
            "passes now"
        )

    def _failure(self, feed: Feed, sequences: Ints) -> Failure:
        return Failure(padded_tokens(feed, sequences, self.settings), is_single=len(sequences) < 2)

    def _below(self, feed: Feed, sequences: Ints, limit: int | None) -> Iterator[Ints]:
        """The sequences in halves of about equal load, and these again, until each is below the limit."""
        if limit is None or len(sequences) < 2 or padded_tokens(feed, sequences, self.settings) < limit:
            yield sequences
            return
        ends = np.cumsum(feed.tokens[sequences])
        cut = 1 + int(np.argmin(np.abs(ends[:-1] - ends[-1] / 2)))
        yield from self._below(feed, sequences[:cut], limit)
        yield from self._below(feed, sequences[cut:], limit)

    def _switch(self, name: str) -> None:
        self.settings = with_strategy(self.settings, name)
        self.treat(self.settings)


def next_strategy(settings: Settings) -> str | None:
    """The next allowed strategy that is not on yet, by most memory saved."""
    return next((name for name in OOM_STEPS if _can(settings, name)), None)


def with_strategy(settings: Settings, name: str) -> Settings:
    """The settings with one more strategy on."""
    if name == "slices":
        shorter = max(LEAST_SLICE_TOKENS, settings.slice_tokens // 2)
        tokens = shorter if settings.slice_tokens else FIRST_SLICE_TOKENS
        return settings.model_copy(update={"slice_tokens": tokens, "checkpoint_every": 0})
    if name == "checkpointing":
        return settings.model_copy(update={"checkpoint_every": 1})
    if name == "offloading":
        kind = "boundaries" if settings.checkpoint_every or settings.slice_tokens else "all"
        return settings.model_copy(update={"offload": kind})
    if name == "weights":
        return moved(settings)
    if settings.loss == "full":
        return settings.model_copy(update={"loss": "chunked"})
    tile = max(LEAST_TILE_BYTES, settings.loss_tile_bytes // 4)
    return settings.model_copy(update={"loss_tile_bytes": tile})


def _can(settings: Settings, name: str) -> bool:
    if name not in settings.recovery:
        return False
    if name == "slices":
        # Whole layers are checkpointed first: as much less memory for short rows, and no slower.
        is_next = settings.checkpoint_every == 1 or "checkpointing" not in settings.recovery
        if not settings.slice_tokens:
            return is_next and settings.offload != "all"
        return settings.slice_tokens > LEAST_SLICE_TOKENS
    if name == "checkpointing":
        return settings.checkpoint_every != 1 and not settings.slice_tokens and settings.offload == "none"
    if name == "offloading":
        return settings.offload == "none"
    if name == "weights":
        # Its pass over one layer at a time is the checkpointing.
        passes_layers = settings.checkpoint_every == 1 or settings.slice_tokens > 0
        return passes_layers and settings.offload != "all" and not settings.weights_offload
    return settings.loss == "full" or (
        settings.loss == "chunked" and settings.loss_tile_bytes > LEAST_TILE_BYTES
    )


OOM_STEPS: dict[str, Callable[[Settings], str]] = {
    "slices": lambda settings: (
        f"layers are computed in slices of {settings.slice_tokens:,} tokens from now on"
    ),
    "checkpointing": lambda settings: "every layer is checkpointed from now on",
    "offloading": lambda settings: "activations are offloaded to CPU from now on",
    "loss_tile": lambda settings: f"the loss uses chunks of {gib(settings.loss_tile_bytes)} from now on",
    "weights": lambda settings: "the layers' weights are kept on CPU from now on",
}
"""Strategies in the order they are tried, and their sentences."""
