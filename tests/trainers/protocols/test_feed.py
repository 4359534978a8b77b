from types import SimpleNamespace

import numpy as np
import pytest

from memtrain.trainers.batches.collate import MicroBatch, nothing
from memtrain.trainers.data.packing.step_order import BatchSize, count_steps
from memtrain.trainers.protocols.events import DataEvent
from memtrain.trainers.protocols.feed import Steps, eval_micro_batches, eval_orders


class Lengths:
    """A feed of given lengths, each sequence weighing what it is long."""

    def __init__(self, *tokens: int) -> None:
        self.tokens = np.array(tokens, np.int64)
        self.weights = self.tokens - 1
        self.epoch_ptr = np.array([0, len(tokens)])

    @property
    def loss_tokens(self) -> np.ndarray:
        return self.weights

    def micro_batch(self, sequences: np.ndarray) -> MicroBatch:
        return nothing(pad_id=0, is_flat=True)

    def reported(self, split: str) -> DataEvent:
        return DataEvent(split=split, rows=0, tokens=0, loss_tokens=0, sequences=0)


@pytest.fixture
def steps(make_settings):
    feed = Lengths(*range(2, 12))
    return Steps(feed, make_settings(batch_size=4, micro_batch_size=2), seed=0, shuffle=True)


def sequences(steps: Steps, step: int, num_ranks: int = 1) -> list[int]:
    works = [steps.work(step, rank=rank, num_ranks=num_ranks) for rank in range(num_ranks)]
    return sorted(int(i) for work in works for micro_batch in work.micro_batches for i in micro_batch)


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


def test_a_step_tells_the_share_of_the_data_that_was_passed(steps: Steps):
    """Ten rows in steps of four: three steps an epoch."""
    passes = [steps.work(step, rank=0, num_ranks=1).passes for step in range(6)]
    assert passes == pytest.approx([1 / 3, 2 / 3, 1, 4 / 3, 5 / 3, 2])


def test_ranks_share_a_step_and_its_denominator(steps: Steps):
    alone = steps.work(1, rank=0, num_ranks=1)
    shared = [steps.work(1, rank=rank, num_ranks=2) for rank in range(2)]
    assert sequences(steps, 1, num_ranks=2) == sequences(steps, 1)
    assert {work.denominator for work in shared} == {alone.denominator}
    assert alone.num_tokens - alone.num_sequences == alone.denominator


def test_evaluation_takes_every_sequence_once(steps: Steps):
    (order,) = eval_orders(steps.feed)
    dealt = [
        eval_micro_batches(steps.feed, steps.settings, order, rank=rank, num_ranks=3) for rank in range(3)
    ]
    assert sorted(int(i) for rank in dealt for micro_batch in rank for i in micro_batch) == list(range(10))


def test_an_epoch_with_rows_of_its_own_takes_its_own_sequences():
    """Sequences 0 to 3 are the first epoch's, 4 to 6 the second's; the third begins again."""
    feed = SimpleNamespace(
        tokens=np.full(7, 5), weights=np.full(7, 4), loss_tokens=np.full(7, 4), epoch_ptr=np.array([0, 4, 7])
    )
    settings = SimpleNamespace(
        batch_size=2, batch_tokens=None, group_by_length=False, micro_batch_size=2, micro_tokens=None
    )
    steps = Steps(feed, settings, seed=0, shuffle=True)  # type: ignore[arg-type]
    made = [steps.work(step, rank=0, num_ranks=1) for step in range(6)]
    assert [work.epoch for work in made] == [0, 0, 1, 1, 2, 2]
    seen = [np.sort(np.concatenate([made[i].sequences, made[i + 1].sequences])).tolist() for i in (0, 2, 4)]
    assert seen == [[0, 1, 2, 3], [4, 5, 6], [0, 1, 2, 3]]
    count = count_steps(
        feed.tokens, BatchSize(2, None), epochs=3, seed=0, shuffle=True, epoch_ptr=feed.epoch_ptr
    )
    assert count == 6


def test_the_heaviest_of_some_steps_is_found_without_laying_them_out(steps: Steps):
    """The same as each step's own count, within the pass of the first of them."""
    tokens = [steps.work(step, rank=0, num_ranks=1).num_tokens for step in range(6)]
    in_first_pass = sum(steps.work(step, rank=0, num_ranks=1).epoch == 0 for step in range(6))
    assert steps.most_tokens(0, 2) == max(tokens[:2])
    assert steps.most_tokens(1, 6) == max(tokens[1:in_first_pass])
