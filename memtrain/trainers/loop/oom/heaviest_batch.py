"""The heaviest micro-batch that a run will meet, and a step made of it."""

from __future__ import annotations

import numpy as np

from memtrain.memory.plan.settings import Settings
from memtrain.trainers.protocols.feed import Feed, Ints, StepSource, StepWork, padded_tokens

MOST_SCANNED = 200_000
"""Sequences whose steps are laid out to find the heaviest micro-batch; beyond, the longest rows of the data
are put together in its place, which no step can exceed. Taste: a second."""


def heaviest_micro_batch(
    steps: StepSource, settings: Settings, *, start: int = 0, replicas: int = 1
) -> tuple[Ints, bool]:
    """The micro-batch with most tokens from step `start` on, of any replica; whether a step has it."""
    feed = steps.feed
    heaviest: Ints = np.zeros(0, np.int64)
    most, seen = -1, 0
    for step in range(start, settings.max_steps):
        works = [steps.work(step, rank=replica, num_ranks=replicas) for replica in range(replicas)]
        for sequences in (one for work in works for one in work.micro_batches):
            load = padded_tokens(feed, sequences, settings)
            if load > most:
                heaviest, most = sequences, load
        seen += works[0].num_sequences
        if seen > MOST_SCANNED:
            return longest_together(feed, settings), False
    return heaviest, True


def step_of(feed: Feed, sequences: Ints, *, step: int, has_more: bool, replicas: int = 1) -> StepWork:
    """An optimizer step of one micro-batch; `has_more`: of the same twice, the second meets gradients."""
    micro_batches = (sequences, sequences) if has_more else (sequences,)
    return StepWork(
        step=step,
        epoch=0,
        is_last_of_epoch=False,
        sequences=sequences,
        micro_batches=micro_batches,
        denominator=max(1.0, float(feed.weights[sequences].sum()) * len(micro_batches) * replicas),
        num_tokens=int(feed.tokens[sequences].sum()),
        num_sequences=len(sequences),
    )


def longest_together(feed: Feed, settings: Settings) -> Ints:
    """The longest sequences that one micro-batch may hold: from the longest down, each that still fits."""
    return longest_of(feed.tokens, settings.micro_batch_size, settings.micro_tokens)


def longest_of(tokens: Ints, most: int, limit: int | None) -> Ints:
    """Places of the longest lengths, `most` in number and `limit` in sum at most: from the longest down, each
    length that still fits; the longest of all whatever it is."""
    order = np.argsort(-tokens, kind="stable").astype(np.int64)
    if limit is None:
        return order[:most]
    falling = -tokens[order]
    taken, place, left = order[:1].tolist(), 1, limit + int(falling[0])
    while len(taken) < most:
        place = max(place, int(np.searchsorted(falling, -left)))
        if place >= len(order):
            break
        taken.append(int(order[place]))
        left += int(falling[place])
        place += 1
    return np.array(taken, np.int64)
