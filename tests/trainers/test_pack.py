"""Packing: nothing lost, nothing twice, as few bins as the textbook, in a fraction of a second."""

import subprocess
import sys
import time
from bisect import bisect_left, insort

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memtrain.trainers.data.pack import STRATEGIES, PackPlan, best_fit_decreasing, pack

ROWS = st.lists(st.integers(0, 60), max_size=120)
CAPACITY = st.integers(1, 40)


def textbook_num_bins(lengths: list[int], capacity: int) -> int:
    """Best-fit decreasing, one item at a time over a sorted list of rooms."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        index = bisect_left(rooms, length)
        room = rooms.pop(index) if index < len(rooms) else capacity
        insort(rooms, room - length)
    return len(rooms)


def long_tailed(num_rows: int, capacity: int) -> np.ndarray:
    lengths = np.random.default_rng(0).lognormal(5.8, 0.9, num_rows)
    return np.clip(lengths, 1, capacity).astype(np.int64)


def kept_tokens(plan: PackPlan) -> list[tuple[int, int]]:
    """Every (row, token) of the plan, bin by bin."""
    return [
        (row, token)
        for bin_index in range(plan.num_bins)
        for row, start, length in plan.items(bin_index)
        for token in range(start, start + length)
    ]


@given(ROWS, CAPACITY)
@settings(max_examples=50, deadline=None)
def test_bulk_best_fit_needs_as_many_bins_as_the_textbook(lengths: list[int], capacity: int):
    items = [min(length, capacity) for length in lengths if length]
    _, bin_ptr = best_fit_decreasing(np.array(items, dtype=np.int64), capacity)
    assert len(bin_ptr) - 1 == textbook_num_bins(items, capacity)


@given(ROWS, CAPACITY, st.sampled_from(sorted(STRATEGIES)))
@settings(max_examples=50, deadline=None)
def test_no_bin_overflows_and_no_token_is_lost_or_packed_twice(
    lengths: list[int], capacity: int, strategy: str
):
    plan = pack(lengths, capacity, strategy)
    per_bin = [sum(length for _, _, length in plan.items(b)) for b in range(plan.num_bins)]
    assert all(0 < tokens <= capacity for tokens in per_bin)
    limit = capacity if strategy == "bfd" else max([0, *lengths])
    expected = [(row, token) for row, length in enumerate(lengths) for token in range(min(length, limit))]
    assert sorted(kept_tokens(plan)) == expected
    assert plan.tokens_total == sum(lengths)
    assert plan.tokens_cut == sum(lengths) - len(expected)
    assert plan.rows_empty == lengths.count(0)


def test_bfd_cuts_long_rows_and_counts_what_is_lost():
    """Capacity 10: rows of 14 and 23 lose 4 and 13 tokens; 6 + 4 fill the third bin."""
    plan = pack([14, 6, 23, 4], 10, "bfd")
    assert [sorted(plan.items(b)) for b in range(plan.num_bins)] == [
        [(2, 0, 10)],
        [(0, 0, 10)],
        [(1, 0, 6), (3, 0, 4)],
    ]
    assert (plan.tokens_total, plan.tokens_cut, plan.rows_cut, plan.fragments) == (47, 17, 2, 0)
    assert plan.fill == 1.0


def test_bfd_split_keeps_every_token_of_long_rows():
    """Capacity 10: 23 = 10 + 10 + 3, and the 3 goes with the row of 7."""
    plan = pack([23, 7], 10, "bfd_split")
    assert plan.num_bins == 3
    assert plan.items(2) == [(1, 0, 7), (0, 20, 3)]
    assert (plan.tokens_cut, plan.rows_cut, plan.fragments, plan.fill) == (0, 0, 3, 1.0)


def test_wrapped_cuts_the_stream_wherever_a_bin_ends():
    """Capacity 4 over rows of 3, 0, 6: abc d | efgh | i."""
    plan = pack([3, 0, 6], 4, "wrapped")
    assert [plan.items(b) for b in range(plan.num_bins)] == [[(0, 0, 3), (2, 0, 1)], [(2, 1, 4)], [(2, 5, 1)]]
    assert (plan.fragments, plan.rows_empty, plan.tokens_cut) == (3, 1, 0)
    assert plan.fill == 9 / 12


@pytest.mark.parametrize("strategy", sorted(STRATEGIES))
def test_no_rows_make_no_bins(strategy: str):
    plan = pack([], 8, strategy)
    assert (plan.num_bins, plan.fill, len(plan.item_row)) == (0, 0.0, 0)


@pytest.mark.parametrize("strategy", sorted(STRATEGIES))
def test_the_same_lengths_give_the_same_plan_in_small_types(strategy: str):
    lengths = long_tailed(2_000, 512) * 2
    first, second = (pack(lengths, 512, strategy) for _ in range(2))
    for name, dtype in (
        ("item_row", np.int64),
        ("item_start", np.int64),
        ("item_length", np.int32),
        ("bin_ptr", np.int64),
    ):
        assert getattr(first, name).dtype == dtype
        assert np.array_equal(getattr(first, name), getattr(second, name))


def test_bins_beyond_the_16_bit_keys_are_packed_too():
    lengths = [70_000, 30_000, 99_999, 1]
    plan = pack(lengths, 100_000, "bfd")
    assert [sorted(row for row, _, _ in plan.items(b)) for b in range(plan.num_bins)] == [[2, 3], [0, 1]]


@pytest.mark.parametrize("capacity", [2048, 8192])
def test_a_million_rows_are_packed_tight_in_half_a_second(capacity: int):
    """Fill is 99.98 % and the time about 0.1 s of CPU; the bound leaves room for a loaded machine."""
    lengths = long_tailed(1_000_000, capacity)
    started = time.process_time()
    plan = pack(lengths, capacity, "bfd")
    assert time.process_time() - started < 0.5
    assert plan.fill >= 0.999
    assert len(plan.item_row) == 1_000_000


def test_packing_does_not_import_torch():
    code = "import sys, memtrain.trainers.data.pack; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
