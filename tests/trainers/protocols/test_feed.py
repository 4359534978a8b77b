import numpy as np
import pytest

from memtrain.trainers.batches.collate import MicroBatch, nothing
from memtrain.trainers.protocols.events import DataEvent
from memtrain.trainers.protocols.feed import Steps, eval_micro_batches


class Lengths:
    """A feed of given lengths, each sequence weighing what it is long."""

    def __init__(self, *tokens: int) -> None:
        self.tokens = np.array(tokens, np.int64)
        self.weights = self.tokens - 1

    @property
    def learnt(self) -> np.ndarray:
        return self.weights

    def micro_batch(self, sequences: np.ndarray) -> MicroBatch:
        return nothing(pad_id=0, is_flat=True)

    def told(self, split: str) -> DataEvent:
        return DataEvent(split=split, rows=0, tokens=0, learnt=0, sequences=0)


@pytest.fixture
def steps(make_settings):
    feed = Lengths(*range(2, 12))
    return Steps(feed, make_settings(batch_rows=4, micro_rows=2), seed=0, shuffle=True)


def sequences(steps: Steps, step: int, num_ranks: int = 1) -> list[int]:
    works = [steps.work(step, rank=rank, num_ranks=num_ranks) for rank in range(num_ranks)]
    return sorted(int(i) for work in works for micro in work.micros for i in micro)


def test_an_epoch_sees_every_sequence_once_and_the_next_another_order(steps: Steps):
    first = [sequences(steps, step) for step in range(3)]
    assert sorted(sum(first, [])) == list(range(10))
    assert [steps.work(step, rank=0, num_ranks=1).is_last_of_epoch for step in range(3)] == [
        False,
        False,
        True,
    ]
    second = [sequences(steps, step) for step in range(3, 6)]
    assert sorted(sum(second, [])) == list(range(10))
    assert first != second


def test_a_step_is_the_same_whatever_was_asked_before(steps: Steps):
    later = sequences(steps, 7)
    assert sequences(steps, 0) != later
    assert sequences(steps, 7) == later
    fresh = Steps(steps.feed, steps.settings, seed=0, shuffle=True)
    assert sequences(fresh, 7) == later


def test_ranks_share_a_step_and_its_denominator(steps: Steps):
    alone = steps.work(1, rank=0, num_ranks=1)
    shared = [steps.work(1, rank=rank, num_ranks=2) for rank in range(2)]
    assert sequences(steps, 1, num_ranks=2) == sequences(steps, 1)
    assert {work.denominator for work in shared} == {alone.denominator}
    assert alone.num_tokens - alone.num_sequences == alone.denominator


def test_evaluation_takes_every_sequence_once(steps: Steps):
    dealt = [eval_micro_batches(steps.feed, steps.settings, rank=rank, num_ranks=3) for rank in range(3)]
    assert sorted(int(i) for rank in dealt for micro in rank for i in micro) == list(range(10))
