"""Micro-batches made ahead: a thread lays out the next while the step works."""

from __future__ import annotations

from dataclasses import dataclass, field
from threading import Thread
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from memtrain.trainers.batches.tensors import with_tensors
from memtrain.trainers.protocols.feed import Feed, Ints
from memtrain.trainers.protocols.method import Batch


@dataclass(slots=True)
class _Making:
    """A micro-batch that a thread makes."""

    feed: Feed
    sequences: Ints
    thread: Thread
    made: list[Any] = field(default_factory=list)
    """The micro-batch, once it is made; nothing where making it failed."""


@dataclass(slots=True)
class BatchesAhead:
    """The next micro-batch, on a thread; on CUDA in pinned memory, from which copies leave the host alone.

    A micro-batch is a function of its sequences, so that one which was made ahead is the same to the bit,
    and one that is not asked for after all is forgotten: nothing of this is saved, and a run that is killed
    loses nothing. A failure is not told from the thread: the micro-batch is made again where it is asked for.
    """

    after_step: Ints | None = None
    """Sequences of the micro-batch after the last one of a step, where they are known."""
    num_taken: int = 0
    """Micro-batches that were there when they were asked for, or on their way."""
    _next: _Making | None = None

    def take(self, feed: Feed, sequences: Ints) -> Batch:
        """The micro-batch of these sequences, made ahead or made now."""
        found, self._next = self._next, None
        if found is not None:
            found.thread.join()
            is_asked = found.feed is feed and np.array_equal(found.sequences, sequences)
            if is_asked and found.made and not _is_watched():
                self.num_taken += 1
                return found.made[0]
        return feed.micro_batch(sequences)

    def begin(self, feed: Feed, sequences: Ints, device: torch.device) -> None:
        """Begin to make the micro-batch that is likely to be asked for next, to be copied to `device`."""
        if _is_watched():
            return
        making = _Making(
            feed,
            sequences,
            Thread(target=lambda: _make(making, pins=device.type == "cuda"), name="batch", daemon=True),
        )
        self._next = making
        making.thread.start()


def _make(making: _Making, *, pins: bool) -> None:
    try:
        made = making.feed.micro_batch(making.sequences)
        making.made.append(with_tensors(made, Tensor.pin_memory) if pins else made)
    except Exception:
        making.made.clear()


def _is_watched() -> bool:
    """Whether this thread's operators are watched: a tensor of another thread would not be counted."""
    return _get_current_dispatch_mode() is not None
