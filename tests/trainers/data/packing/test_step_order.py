import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memtrain.trainers.data.packing.step_order import BatchSize, count_steps, make_epoch, micro_batches


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def test_steps_by_rows_keep_the_smaller_last_one():
    epoch = make_epoch(np.full(7, 5), BatchSize(3, None), seed=0, epoch=0, shuffle=False)
    assert [epoch.step(i).tolist() for i in range(epoch.num_steps)] == [[0, 1, 2], [3, 4, 5], [6]]


def test_steps_by_tokens_take_what_fits_and_at_least_one():
    """4+3 = 7 fits in 8, 9 stands alone although longer, 2+6 = 8 fits exactly."""
    epoch = make_epoch(ints(4, 3, 9, 2, 6), BatchSize(None, 8), seed=0, epoch=0, shuffle=False)
    assert [epoch.step(i).tolist() for i in range(epoch.num_steps)] == [[0, 1], [2], [3, 4]]


def test_the_order_depends_on_seed_and_epoch_only():
    def order(seed: int, epoch: int) -> list[int]:
        made = make_epoch(np.ones(50, np.int64), BatchSize(4, None), seed=seed, epoch=epoch, shuffle=True)
        return made.order.tolist()

    assert order(1, 0) == order(1, 0)
    assert sorted(order(1, 0)) == list(range(50))
    assert order(1, 0) != order(1, 1)
    assert order(1, 0) != order(2, 0)


def test_grouping_by_length_leaves_less_padding_and_loses_nothing():
    tokens = np.random.default_rng(0).integers(1, 500, 400)

    def padding(grouped: bool) -> int:
        epoch = make_epoch(tokens, BatchSize(8, None), seed=0, epoch=0, shuffle=True, group_by_length=grouped)
        assert sorted(epoch.order.tolist()) == list(range(400))
        steps = [tokens[epoch.step(i)] for i in range(epoch.num_steps)]
        return sum(int(step.max() * len(step) - step.sum()) for step in steps)

    assert padding(True) < padding(False) / 10


@pytest.mark.parametrize("epochs", [1.0, 2.0, 1.5, 0.1])
@pytest.mark.parametrize("size", [BatchSize(4, None), BatchSize(None, 1000)])
def test_counted_steps_are_the_steps_of_the_passes(epochs: float, size: BatchSize):
    tokens = np.random.default_rng(0).integers(1, 500, 101)
    counted = count_steps(tokens, size, epochs=epochs, seed=3, shuffle=True)
    expected = 0
    for epoch in range(2):
        part = min(1.0, max(0.0, epochs - epoch))
        steps = make_epoch(tokens, size, seed=3, epoch=epoch, shuffle=True).num_steps
        expected += int(np.ceil(part * steps))
    assert counted == expected


@settings(max_examples=50, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=40),
    num_ranks=st.integers(1, 5),
    micro_batch_size=st.integers(1, 6),
    micro_tokens=st.one_of(st.none(), st.integers(1, 60)),
)
def test_every_sequence_is_dealt_once_and_ranks_take_equally_many(
    lengths: list[int], num_ranks: int, micro_batch_size: int, micro_tokens: int | None
):
    tokens = np.array(lengths, np.int64)
    dealt = micro_batches(
        np.arange(len(tokens)),
        tokens,
        num_ranks=num_ranks,
        micro_batch_size=micro_batch_size,
        micro_tokens=micro_tokens,
    )
    assert len({len(rank) for rank in dealt}) == 1
    flat = [int(i) for rank in dealt for micro_batch in rank for i in micro_batch]
    assert sorted(flat) == list(range(len(tokens)))
    for micro_batch in (micro_batch for rank in dealt for micro_batch in rank):
        assert len(micro_batch) <= micro_batch_size
        assert micro_tokens is None or len(micro_batch) <= 1 or tokens[micro_batch].sum() <= micro_tokens


def test_few_sequences_are_spread_over_the_ranks():
    dealt = micro_batches(
        ints(5, 6), np.ones(7, np.int64), num_ranks=2, micro_batch_size=8, micro_tokens=None
    )
    assert [[m.tolist() for m in rank] for rank in dealt] == [[[5]], [[6]]]
