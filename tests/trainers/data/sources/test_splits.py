"""Which rows are trained on: splits and mixtures, sampled and stable."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memtrain.recipes.sections.data import Data
from memtrain.trainers.data.sources.splits import choose_rows, mixed, span_hashes, split_rows


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


@settings(max_examples=50)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=60), st.floats(0.01, 0.99), st.integers(0, 5))
def test_rows_of_one_prompt_are_on_one_side(prompts, fraction, seed):
    """Prompt 0 is the empty one: its rows are strangers to each other."""
    train, held_out = split_rows(len(prompts), fraction, seed, np.array(prompts, np.uint64))
    assert sorted([*train, *held_out]) == list(range(len(prompts)))
    sides = [{prompts[row] for row in side.tolist()} - {0} for side in (train, held_out)]
    assert not sides[0] & sides[1]
    assert len(train) > 0
    several = len(set(prompts) - {0}) + prompts.count(0) > 1
    assert (len(held_out) > 0) == several
    largest = max([prompts.count(one) for one in prompts if one] or [1])
    assert len(held_out) <= len(prompts) * fraction + largest


def test_prompts_that_are_all_different_are_split_as_rows_are():
    prompts = np.random.default_rng(3).permutation(1 << 20)[:500].astype(np.uint64) + np.uint64(1)
    by_prompt = split_rows(500, 0.1, 7, prompts)
    assert [side.tolist() for side in by_prompt] == [side.tolist() for side in split_rows(500, 0.1, 7)]


def test_spans_have_equal_hashes_where_their_ids_are_equal():
    """[5 6] twice, [6 5], and nothing."""
    ids = np.array([5, 6, 5, 6, 5], np.int32)
    one, other, turned, nothing = span_hashes(ids, np.array([0, 2, 1, 3]), np.array([2, 4, 3, 3])).tolist()
    assert one == other != turned
    assert nothing == 0


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


def test_a_source_that_is_taken_in_part_gives_other_rows_in_every_epoch():
    """Ten rows and ten, weights 1 and 3: 5 of the first, 15 of the second (a pass, and 5 more)."""
    rows = [np.arange(10), np.arange(10, 20)]
    epochs = [mixed(rows, [1.0, 3.0], 0, epoch) for epoch in range(4)]
    firsts = [set(epoch[epoch < 10].tolist()) for epoch in epochs]
    assert [len(one) for one in firsts] == [5] * 4
    assert firsts[0] | firsts[1] == set(range(10)), "two epochs see every row once"
    assert firsts[2] == firsts[0]
    counts = np.bincount(np.concatenate(epochs[:2]), minlength=20)
    assert counts.tolist() == [1] * 10 + [3] * 10


class Two:
    """Two sources of 60 and 40 rows."""

    num_rows = 100
    prompts = None

    def rows_of_source(self, source: int) -> np.ndarray:
        return np.arange(60) if source == 0 else np.arange(60, 100)


def test_epochs_are_drawn_only_where_they_differ():
    weighted = Data(train=({"source": "a", "weight": 1.0}, {"source": "b", "weight": 1.0}))
    made = choose_rows(weighted, Two(), 0, epochs=3)
    assert len(made.later) == 2
    assert all(len(one) == len(made.train) for one in made.later)
    assert not np.array_equal(made.train, made.later[0])
    assert choose_rows(weighted, Two(), 0).later == ()
    assert choose_rows(Data(train=({"source": "a"}, {"source": "b"})), Two(), 0, epochs=3).later == ()
    whole = Data(train=({"source": "a", "weight": 60.0}, {"source": "b", "weight": 40.0}))
    assert choose_rows(whole, Two(), 0, epochs=3).later == (), "whole passes are alike"
