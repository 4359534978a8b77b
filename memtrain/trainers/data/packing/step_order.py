"""The global order of a run: which sequences make which optimizer step, the same for any number of ranks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memtrain.trainers.data.packing.epochs import of_epoch

Ints = NDArray[np.int64]

GROUPED_STEPS = 50
"""Steps whose sequences are sorted together by `group_by_length`: long enough that padding nearly vanishes,
short enough that the order stays random (the field's usual window)."""


@dataclass(frozen=True, slots=True)
class BatchSize:
    """Size of an optimizer step over all ranks: a number of sequences, or a number of tokens."""

    rows: int | None
    tokens: int | None


@dataclass(frozen=True, slots=True)
class Epoch:
    """A pass over the data: the order of the sequences, cut into steps."""

    order: Ints
    """Sequence numbers in the order they are trained on."""
    step_ptr: Ints
    """Step i of the epoch is `order[step_ptr[i]:step_ptr[i + 1]]`."""

    @property
    def num_steps(self) -> int:
        """Optimizer steps of this pass; the last may be smaller."""
        return len(self.step_ptr) - 1

    def step(self, index: int) -> Ints:
        """Sequence numbers of one step."""
        return self.order[self.step_ptr[index] : self.step_ptr[index + 1]]


def make_epoch(
    tokens: Ints, size: BatchSize, *, seed: int, epoch: int, shuffle: bool, group_by_length: bool = False
) -> Epoch:
    """The order of pass number `epoch` over sequences of `tokens` tokens; a pure function."""
    if shuffle:
        order = (
            np.random.Generator(np.random.Philox(key=[seed, epoch])).permutation(len(tokens)).astype(np.int64)
        )
    else:
        order = np.arange(len(tokens), dtype=np.int64)
    if group_by_length:
        order = _grouped(order, tokens, size)
    return Epoch(order, _cut(tokens[order], size))


def longest_first_order(tokens: Ints) -> Ints:
    """The order of an evaluation over sequences of `tokens` tokens: longest first, so that little is
    padded."""
    return np.argsort(-tokens, kind="stable")


def _cut(tokens: Ints, size: BatchSize) -> Ints:
    """Bounds of the steps: `rows` each, or as many as stay within `tokens` (at least one)."""
    count = len(tokens)
    if size.rows is not None:
        return np.append(np.arange(0, count, size.rows, dtype=np.int64), count)
    assert size.tokens is not None, "A batch size is counted in rows or in tokens."
    ends = np.cumsum(tokens)
    bounds = [0]
    while bounds[-1] < count:
        begin = bounds[-1]
        used = int(ends[begin - 1]) if begin else 0
        fits = int(np.searchsorted(ends, used + size.tokens, side="right"))
        bounds.append(max(fits, begin + 1))
    return np.array(bounds, dtype=np.int64)


def _grouped(order: Ints, tokens: Ints, size: BatchSize) -> Ints:
    """Sort windows of the order by length, the longest window-mate first, so that neighbours pad little."""
    mean = max(1.0, float(tokens.mean())) if len(tokens) else 1.0
    rows = size.rows if size.rows is not None else max(1, int((size.tokens or 0) / mean))
    window = rows * GROUPED_STEPS
    pieces = [order[begin : begin + window] for begin in range(0, len(order), window)]
    longest_first = [piece[np.argsort(-tokens[piece], kind="stable")] for piece in pieces]
    return np.concatenate([order[:0], *longest_first])


def count_steps(
    tokens: Ints,
    size: BatchSize,
    *,
    epochs: float,
    seed: int,
    shuffle: bool,
    group_by_length: bool = False,
    epoch_ptr: Ints | None = None,
) -> int:
    """Optimizer steps of `epochs` passes; a part of a pass is that part of its steps, rounded up.

    `epoch_ptr`: where the sequences of each epoch begin that has rows of its own; None: all have the same.
    """
    bounds = epoch_ptr if epoch_ptr is not None else np.array([0, len(tokens)])
    whole = int(epochs)
    part = epochs - whole
    total = 0
    for epoch in range(whole + (part > 0)):
        first, end = of_epoch(bounds, epoch)
        own = tokens[first:end]
        made = make_epoch(own, size, seed=seed, epoch=epoch, shuffle=shuffle, group_by_length=group_by_length)
        total += made.num_steps if epoch < whole else int(np.ceil(part * made.num_steps))
        if size.rows is not None and epoch == 0 and len(bounds) == 2:
            return whole * made.num_steps + int(np.ceil(part * made.num_steps))
    return total


def micro_batches(
    sequences: Ints, tokens: Ints, *, num_ranks: int, micro_batch_size: int, micro_tokens: int | None
) -> list[list[Ints]]:
    """Micro-batches of a step's sequences for each rank: `result[rank][i]`, equally many on every rank.

    Order is kept; no micro-batch has more than `micro_batch_size` sequences or `micro_tokens` tokens (a
    longer sequence stands alone). Micro-batches are dealt round robin; a rank left over takes empty ones, so
    that collectives match.
    """
    rows = min(micro_batch_size, max(1, -(-len(sequences) // num_ranks)))
    made: list[Ints] = []
    begin, used = 0, 0
    for position, sequence in enumerate(sequences):
        length = int(tokens[sequence])
        full = position - begin >= rows or (micro_tokens is not None and used + length > micro_tokens)
        if position > begin and full:
            made.append(sequences[begin:position])
            begin, used = position, 0
        used += length
    made.append(sequences[begin:])
    rounds = -(-len(made) // num_ranks)
    empty = sequences[:0]
    made += [empty] * (rounds * num_ranks - len(made))
    return [made[rank::num_ranks] for rank in range(num_ranks)]
