"""Micro-batches that a thread makes are those that the loop would have made, and none is trusted blindly."""

import threading
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from memtrain.trainers.batches.collate import MicroBatch, Piece, lay_end_to_end
from memtrain.trainers.batches.tensors import with_tensors
from memtrain.trainers.build.step import BatchesAhead
from memtrain.trainers.memory_meter.live_tensors import TensorPeak


class Rows:
    """A feed of rows of growing length, which notes the thread of each micro-batch."""

    def __init__(self) -> None:
        self.threads: list[str] = []

    def micro_batch(self, sequences: Any) -> MicroBatch:
        self.threads.append(threading.current_thread().name)
        pieces = [Piece(np.arange(3 + n, dtype=np.int32), np.ones(3 + n, np.bool_)) for n in sequences]
        return lay_end_to_end(pieces, pad_id=0)


def rows_and_ahead(kind: type[Rows] = Rows) -> tuple[Any, BatchesAhead]:
    return kind(), BatchesAhead(is_on=True, pins=False)


def same(one: Any, other: Any) -> bool:
    found: list[torch.Tensor] = []
    for batch in (one, other):
        with_tensors(batch, lambda tensor: found.append(tensor) or tensor)
    half = len(found) // 2
    return half > 5 and all(torch.equal(a, b) for a, b in zip(found[:half], found[half:], strict=True))


def test_the_one_made_ahead_is_the_one_that_is_asked_for():
    feed, ahead = rows_and_ahead()
    ahead.begin(feed, np.array([2, 5]))
    made = ahead.take(feed, np.array([2, 5]))
    assert feed.threads == ["batch_0"]
    assert same(made, Rows().micro_batch([2, 5]))
    assert ahead.num_taken == 1


def test_all_are_made_by_one_thread():
    feed, ahead = rows_and_ahead()
    for number in range(3):
        ahead.begin(feed, np.array([number]))
        ahead.take(feed, np.array([number]))
    assert feed.threads == ["batch_0"] * 3
    assert ahead.num_taken == 3


def test_another_one_is_made_where_another_is_asked_for():
    """Micro-batches are split when memory runs out, and completions of the next step are another feed."""
    feed, ahead = rows_and_ahead()
    ahead.begin(feed, np.array([2, 5]))
    assert same(ahead.take(feed, np.array([2])), Rows().micro_batch([2]))
    ahead.begin(feed, np.array([2]))
    assert same(ahead.take(rows_and_ahead()[0], np.array([2])), Rows().micro_batch([2]))
    assert ahead.num_taken == 0


def test_a_failure_is_raised_where_the_batch_is_asked_for():
    class Broken(Rows):
        def micro_batch(self, sequences: Any) -> MicroBatch:
            super().micro_batch(sequences)
            raise MemoryError

    feed, ahead = rows_and_ahead(Broken)
    ahead.begin(feed, np.array([1]))
    with pytest.raises(MemoryError):
        ahead.take(feed, np.array([1]))
    assert feed.threads == ["batch_0", "MainThread"]


def test_tensors_of_a_watched_step_are_made_where_they_are_counted():
    feed, ahead = rows_and_ahead()
    ahead.begin(feed, np.array([1]))
    with TensorPeak():
        ahead.take(feed, np.array([1]))
        ahead.begin(feed, np.array([2]))
        ahead.take(feed, np.array([2]))
    assert feed.threads == ["batch_0", "MainThread", "MainThread"]


def test_every_tensor_of_a_batch_is_pinned():
    class Pair(NamedTuple):
        first: torch.Tensor
        name: str

    batch = lay_end_to_end([Piece(np.arange(4, dtype=np.int32), np.ones(4, np.bool_))], pad_id=0)
    layout: Any = batch.layout
    doubled: Any = with_tensors((batch, Pair(torch.ones(2), "a")), lambda tensor: tensor * 2)
    assert torch.equal(doubled[0].layout.within.cu_query, layout.within.cu_query * 2)
    assert doubled[1].first.tolist() == [2.0, 2.0]
    assert doubled[1].name == "a"
    assert doubled[0].position_ids is doubled[0].layout.position_ids, "pinned twice"
