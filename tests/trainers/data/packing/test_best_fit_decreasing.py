"""Packing: as few bins as the textbook, no bin too full, nothing lost, nothing twice."""

import subprocess
import sys
from bisect import bisect_left, insort

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from memtrain.trainers.data.packing.best_fit_decreasing import best_fit_decreasing

ITEMS = st.integers(1, 40).flatmap(
    lambda capacity: st.tuples(st.lists(st.integers(1, capacity), max_size=120), st.just(capacity))
)


def packed(lengths: list[int], capacity: int) -> list[list[int]]:
    """Numbers of the items of each bin."""
    order, bin_ptr = best_fit_decreasing(np.array(lengths, dtype=np.int64), capacity)
    return [order[begin:end].tolist() for begin, end in zip(bin_ptr[:-1], bin_ptr[1:], strict=True)]


def textbook_num_bins(lengths: list[int], capacity: int) -> int:
    """Best-fit decreasing, one item at a time over a sorted list of rooms."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        index = bisect_left(rooms, length)
        room = rooms.pop(index) if index < len(rooms) else capacity
        insort(rooms, room - length)
    return len(rooms)


@given(ITEMS)
@settings(max_examples=50, deadline=None)
def test_bulk_best_fit_needs_as_many_bins_as_the_textbook(given_items: tuple[list[int], int]):
    lengths, capacity = given_items
    assert len(packed(lengths, capacity)) == textbook_num_bins(lengths, capacity)


@given(ITEMS)
@settings(max_examples=50, deadline=None)
def test_no_bin_overflows_and_every_item_is_in_one(given_items: tuple[list[int], int]):
    lengths, capacity = given_items
    bins = packed(lengths, capacity)
    assert all(0 < sum(lengths[item] for item in items) <= capacity for items in bins)
    assert sorted(item for items in bins for item in items) == list(range(len(lengths)))


def test_the_longest_item_of_a_bin_comes_first():
    """Capacity 10: 7 + 3 and 6 + 4, found from 3, 6, 4, 7."""
    assert packed([3, 6, 4, 7], 10) == [[3, 0], [1, 2]]


def test_lengths_beyond_the_16_bit_keys_are_packed_too():
    bins = packed([70_000, 30_000, 99_999, 1], 100_000)
    assert [sorted(items) for items in bins] == [[2, 3], [0, 1]]


def test_packing_does_not_import_torch():
    code = "import sys, memtrain.trainers.data.packing.best_fit_decreasing; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
