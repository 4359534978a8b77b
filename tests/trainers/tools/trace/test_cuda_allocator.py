"""The caching allocator, step by step by hand, and what holds for every sequence."""

import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memtrain.memory.plan.units import MIB
from memtrain.trainers.tools.trace import cuda_allocator
from memtrain.trainers.tools.trace.cuda_allocator import (
    CachingAllocator,
    OutOfCapacity,
    replay,
    smallest_capacity,
)

CONSTANTS = {
    "kMinBlockSize": "ROUND_BLOCK",
    "kSmallSize": "SMALL",
    "kSmallBuffer": "SMALL_SEGMENT",
    "kMinLargeAlloc": "MIN_OWN_SEGMENT",
    "kRoundLarge": "ROUND_SEGMENT",
}
"""torch's names of the sizes, in the headers that it ships, and ours."""


@pytest.mark.parametrize("name", CONSTANTS)
def test_sizes_are_those_of_torchs_own_header(name):
    headers = Path(torch.__file__).parent / "include" / "c10"
    files = ("core/AllocatorConfig.h", "cuda/CUDACachingAllocator.h", "cuda/CUDAAllocatorConfig.h")
    text = "".join((headers / file).read_text() for file in files if (headers / file).is_file())
    found = re.search(rf"constexpr size_t {name} = (\d+);", text)
    if found is None:
        pytest.skip(f"torch {torch.__version__} ships no header with {name}")
    assert int(found.group(1)) == getattr(cuda_allocator, CONSTANTS[name])


def test_a_cache_that_grows_by_a_token_leaves_every_size_behind_without_segments():
    """Source: generation with a cache that is concatenated anew for each token, the best known case."""
    events, size = [(0, 30 * MIB)], 30 * MIB
    for step in range(1, 11):
        size += 2 * MIB
        events += [(step, size), (step - 1, 0)]
    live = max(2 * size - 2 * MIB, 0)
    assert replay(events, expandable=True).peak_reserved <= live + size
    assert replay(events, expandable=False).peak_reserved > 3 * live


def native(capacity=None):
    return CachingAllocator(capacity, expandable=False)


def test_a_small_block_takes_a_segment_of_two_mib_and_is_rounded_to_512_bytes():
    allocator = native()
    allocator.allocate(1, 100)
    allocator.allocate(2, 513)
    assert (allocator.reserved, allocator.allocated) == (2 * MIB, 512 + 1024)


def test_a_large_rest_of_one_mib_is_not_split_off_and_counts_as_allocated():
    allocator = native()
    allocator.allocate(1, 3 * MIB)
    assert (allocator.reserved, allocator.allocated) == (20 * MIB, 3 * MIB)
    allocator.allocate(2, 10 * MIB + 1)
    assert (allocator.reserved, allocator.allocated) == (20 * MIB, 13 * MIB + 512)
    allocator.allocate(3, 15 * MIB)
    # 15 MiB is a segment of its own, 16 MiB after rounding to 2 MiB: the rest of 1 MiB stays in the block.
    assert (allocator.reserved, allocator.allocated) == (36 * MIB, 29 * MIB + 512)
    for name in (1, 2, 3):
        allocator.free(name)
    assert (allocator.reserved, allocator.allocated) == (36 * MIB, 0)


def test_freed_neighbours_merge_and_the_best_fit_is_taken():
    allocator = native()
    allocator.allocate(1, 9 * MIB)
    allocator.allocate(2, 9 * MIB)
    allocator.free(1)
    allocator.free(2)
    allocator.allocate(3, 18 * MIB)
    assert allocator.reserved == 20 * MIB
    allocator.allocate(4, 40 * MIB)
    allocator.free(3)
    allocator.free(4)
    allocator.allocate(5, 12 * MIB)
    # The segment of 20 MiB fits better than that of 40: a request for 40 still finds its own.
    allocator.allocate(6, 40 * MIB)
    assert allocator.reserved == 60 * MIB


def test_small_and_large_blocks_never_share_a_segment():
    allocator = native()
    allocator.allocate(1, 20 * MIB)
    allocator.free(1)
    allocator.allocate(2, MIB)
    assert allocator.reserved == 22 * MIB


def test_a_full_device_releases_whole_unused_segments_and_tries_again():
    allocator = native(capacity=40 * MIB)
    allocator.allocate(1, 16 * MIB)
    allocator.free(1)
    allocator.allocate(2, 30 * MIB)
    assert (allocator.num_retries, allocator.reserved) == (1, 30 * MIB)
    with pytest.raises(OutOfCapacity):
        allocator.allocate(3, 30 * MIB)


def test_a_segment_partly_in_use_cannot_be_released():
    allocator = native(capacity=40 * MIB)
    allocator.allocate(1, 30 * MIB)
    allocator.free(1)
    allocator.allocate(2, 2 * MIB)
    with pytest.raises(OutOfCapacity):
        allocator.allocate(3, 30 * MIB)
    assert allocator.reserved == 30 * MIB


def test_expandable_segments_grow_by_chunks_of_twenty_mib():
    allocator = CachingAllocator(expandable=True)
    allocator.allocate(1, 3 * MIB)
    assert (allocator.reserved, allocator.allocated) == (20 * MIB, 3 * MIB)
    allocator.allocate(2, 18 * MIB)
    # 17 MiB are left; one more chunk makes room for 18.
    assert (allocator.reserved, allocator.allocated) == (40 * MIB, 21 * MIB)
    allocator.allocate(3, 100)
    assert allocator.reserved == 42 * MIB


def test_expandable_segments_use_what_fragments_the_native_allocator():
    # Two freed neighbours of 30 MiB hold 60 MiB in one range, but not in two segments.
    events = [(1, 30 * MIB), (2, 30 * MIB), (1, 0), (2, 0), (3, 60 * MIB)]
    assert replay(events, expandable=False).peak_reserved == 120 * MIB
    assert replay(events, expandable=True).peak_reserved == 60 * MIB


def test_an_expandable_segment_gives_whole_chunks_back_from_its_middle_and_maps_them_again():
    allocator = CachingAllocator(capacity=80 * MIB, expandable=True)
    for name in (1, 2, 3):
        allocator.allocate(name, 20 * MIB)
    allocator.free(2)
    allocator.allocate(4, 40 * MIB)
    # 20 MiB in the middle are unmapped to make room at the end.
    assert (allocator.num_retries, allocator.reserved, allocator.allocated) == (1, 80 * MIB, 80 * MIB)
    allocator.free(4)
    allocator.release_cached()
    assert allocator.reserved == 40 * MIB
    allocator.allocate(5, 20 * MIB)
    assert (allocator.reserved, allocator.peak_reserved) == (60 * MIB, 80 * MIB)


def test_a_request_of_nothing_is_nothing():
    allocator = native()
    allocator.allocate(1, 0)
    allocator.free(1)
    assert allocator.reserved == 0


def test_the_smallest_capacity_is_found_and_one_without_retries_is_not_smaller():
    events = [(1, 16 * MIB), (1, 0), (2, 30 * MIB), (2, 0), (3, 44 * MIB)]
    tight = smallest_capacity(events, expandable=False, step=2 * MIB)
    comfortable = smallest_capacity(events, expandable=False, step=2 * MIB, without_retries=True)
    assert (tight, comfortable) == (44 * MIB, 90 * MIB)


SIZES = st.integers(1, 60 * MIB) | st.integers(1, 3 * MIB) | st.integers(1, 4096)
PROGRAM = st.lists(st.tuples(st.booleans(), SIZES, st.integers(0, 30)), max_size=60)


def events_of(program):
    live, events = [], []
    for serial, (is_free, size, pick) in enumerate(program):
        if is_free and live:
            events.append((live.pop(pick % len(live)), 0))
        else:
            live.append(serial)
            events.append((serial, size))
    return events, live


@settings(max_examples=50, deadline=None)
@given(PROGRAM, st.booleans())
def test_reserved_covers_allocated_covers_requested_and_all_returns(program, expandable):
    events, live = events_of(program)
    allocator = CachingAllocator(expandable=expandable)
    requested, sizes = 0, {}
    for serial, size in events:
        if size:
            allocator.allocate(serial, size)
            sizes[serial] = size
            requested += size
        else:
            allocator.free(serial)
            requested -= sizes.pop(serial)
        assert requested <= allocator.allocated <= allocator.reserved
    for serial in live:
        allocator.free(serial)
    assert allocator.allocated == 0
    allocator.release_cached()
    assert allocator.reserved == 0


@settings(max_examples=50, deadline=None)
@given(PROGRAM, st.booleans())
def test_the_smallest_capacity_fits_and_a_step_less_does_not(program, expandable):
    events, _ = events_of(program)
    capacity = smallest_capacity(events, expandable=expandable, step=2 * MIB)
    assert replay(events, capacity=capacity, expandable=expandable).fits
