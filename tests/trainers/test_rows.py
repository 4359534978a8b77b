"""Which rows are learnt from: splits and mixtures, sampled and stable."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memtrain.trainers.data.rows import mixed, split_rows


@settings(max_examples=50)
@given(st.integers(1, 200), st.floats(0, 0.99), st.integers(0, 5))
def test_a_split_takes_every_row_once(num_rows, fraction, seed):
    train, held_out = split_rows(num_rows, fraction, seed)
    assert sorted([*train, *held_out]) == list(range(num_rows))
    assert len(train) > 0
    if fraction > 0 and num_rows > 1:
        assert abs(len(held_out) - num_rows * fraction) <= 1


def test_the_held_out_rows_are_sampled_and_not_the_first():
    _, held_out = split_rows(1000, 0.1, 0)
    assert len(held_out) == 100
    assert held_out[-1] > 900
    assert held_out.tolist() == split_rows(1000, 0.1, 0)[1].tolist()
    assert held_out.tolist() != split_rows(1000, 0.1, 1)[1].tolist()


def test_a_mixture_has_the_shares_of_its_weights():
    """90 rows and 10 rows at 1:1 are 50 and 50 of 100: the first sampled, the second there five times."""
    rows = mixed([np.arange(90), np.arange(90, 100)], [1.0, 1.0], seed=0)
    first = rows[rows < 90]
    assert len(first) == len(set(first.tolist())) == 50
    assert first.max() > 70
    assert np.bincount(rows[rows >= 90] - 90).tolist() == [5] * 10


@settings(max_examples=50)
@given(
    st.lists(st.tuples(st.integers(0, 30), st.floats(0.01, 10)), min_size=1, max_size=4), st.integers(0, 3)
)
def test_no_row_of_a_source_is_there_twice_more_often_than_another(sources, seed):
    sizes, weights = [size for size, _ in sources], [weight for _, weight in sources]
    starts = np.cumsum([0, *sizes])
    rows = [np.arange(starts[i], starts[i + 1]) for i in range(len(sizes))]
    chosen = mixed(rows, weights, seed)
    total = sum(weight for size, weight in sources if size)
    for own, (size, weight) in zip(rows, sources, strict=True):
        counts = np.array([np.sum(chosen == row) for row in own])
        if size:
            assert counts.max() - counts.min() <= 1
            assert counts.sum() == pytest.approx(weight / total * sum(sizes), abs=1)
    assert len(chosen) == sum(sizes)
