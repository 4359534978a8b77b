"""Percentiles, bars and intervals against plain counting."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memtrain.trainers.data.length_report.distribution import (
    PERCENTS,
    bar_ends,
    bars,
    distribution,
    finite,
    ratio_interval,
    share_interval,
)

LENGTHS = st.lists(st.integers(0, 3_000), min_size=1, max_size=60)


@settings(max_examples=50, deadline=None)
@given(LENGTHS)
def test_a_percentile_is_the_least_length_that_enough_rows_do_not_exceed(lengths: list[int]):
    found = distribution("row", np.array(lengths))
    for point in found.percentiles:
        enough = [
            n
            for n in sorted(lengths)
            if sum(m <= n for m in lengths) >= point.percent / 100 * len(lengths) - 1e-6
        ]
        assert point.tokens == enough[0]
    assert [point.percent for point in found.percentiles] == list(PERCENTS)


@settings(max_examples=50, deadline=None)
@given(LENGTHS)
def test_every_row_is_in_the_one_bar_of_its_length(lengths: list[int]):
    made = bars(np.sort(np.array(lengths)))
    for bar in made:
        assert bar.rows == sum(bar.first <= n <= bar.last for n in lengths)
    assert sum(bar.rows for bar in made) == len(lengths)
    assert all(one.last + 1 == other.first for one, other in zip(made, made[1:], strict=False))


def test_bars_end_at_powers_of_two_and_their_halves():
    ends = bar_ends(1_500).tolist()
    assert {64, 96, 128, 192, 1_024, 1_536} <= set(ends)
    assert ends[-1] >= 1_500


def test_the_figures_of_a_few_rows_by_hand():
    found = distribution("row", np.array([4, 1, 7]))
    assert (found.count, found.total, found.mean, found.smallest, found.largest) == (3, 12, 4.0, 1, 7)
    assert found.mean_interval is None
    assert all(point.interval is None for point in found.percentiles)


def test_a_sample_of_all_rows_is_sure():
    """The finite population correction is 0 where everything was read, and near 1 where little was."""
    assert finite(1.0) == 0.0
    assert finite(100.0) == pytest.approx(0.995, abs=1e-3)


def test_intervals_hold_the_true_value_95_times_in_100():
    """400 samples of 200 out of 20,000: at least 88 % of the intervals hold the truth."""
    random = np.random.default_rng(0)
    lengths = random.lognormal(5, 1, 20_000).astype(np.int64) + 1
    lost = np.maximum(lengths - 300, 0)
    held = {"mean": 0, "share": 0, "ratio": 0, "median": 0}
    for _ in range(400):
        chosen = random.choice(20_000, 200, replace=False)
        found = distribution("row", lengths[chosen], scale=100)
        assert found.mean_interval is not None
        held["mean"] += found.mean_interval[0] <= lengths.mean() <= found.mean_interval[1]
        low, high = next(point.interval for point in found.percentiles if point.percent == 50) or (0, 0)
        held["median"] += low <= np.median(lengths) <= high
        low, high = share_interval(int((lengths[chosen] > 300).sum()), 200, 100) or (0, 0)
        held["share"] += low <= (lengths > 300).mean() <= high
        low, high = ratio_interval(lost[chosen], lengths[chosen], 100) or (0, 0)
        held["ratio"] += low <= lost.sum() / lengths.sum() <= high
    assert min(held.values()) >= 0.88 * 400, held


def test_exact_counts_have_no_interval():
    assert share_interval(1, 10, 1.0) is None
    assert ratio_interval(np.array([1]), np.array([2]), 1.0) is None
