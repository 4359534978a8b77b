"""Which micro-batch is the heaviest: by hand, and no real one of the data above it."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memtrain.trainers.loop.oom.heaviest_batch import longest_together, step_of
from memtrain.trainers.protocols.feed import padded_tokens


def feed_of(*tokens: int) -> Any:
    lengths = np.array(tokens, np.int64)
    return SimpleNamespace(tokens=lengths, weights=lengths)


def limits(rows: int, tokens: int | None) -> Any:
    return SimpleNamespace(micro_batch_size=rows, micro_tokens=tokens, padding_free=tokens is not None)


@pytest.mark.parametrize(
    ("rows", "tokens", "expected"),
    [
        (2, None, [3, 1]),
        (8, 10, [3, 0]),  # 7, then 5 does not fit beside it, 3 does: 10.
        (1, 10, [3]),
        (8, 6, [3]),  # A row above the limit is alone.
        (8, 100, [3, 1, 4, 0, 2]),
    ],
)
def test_a_micro_batch_is_filled_from_the_longest_row_down(
    rows: int, tokens: int | None, expected: list[int]
):
    feed = feed_of(3, 5, 2, 7, 4)
    assert longest_together(feed, limits(rows, tokens)).tolist() == expected


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=30),
    st.integers(1, 6),
    st.one_of(st.none(), st.integers(1, 80)),
)
def test_no_limit_is_passed_and_nothing_that_fits_is_left(lengths: list[int], rows: int, tokens: int | None):
    feed, asked = feed_of(*lengths), limits(rows, tokens)
    taken = longest_together(feed, asked)
    load = padded_tokens(feed, taken, limits(rows, tokens or 1))
    assert len(set(taken.tolist())) == len(taken) <= rows
    if tokens is not None and len(taken) > 1:
        assert load <= tokens
    rest = np.delete(feed.tokens, taken)
    if len(taken) < rows and len(rest):
        assert tokens is not None
        assert load + rest.min() > tokens


def test_a_step_of_two_has_the_same_micro_batch_twice():
    work = step_of(feed_of(3, 5), np.array([1]), step=4, has_more=True, replicas=2)
    assert [micro_batch.tolist() for micro_batch in work.micro_batches] == [[1], [1]]
    assert (work.step, work.denominator, work.num_tokens) == (4, 20.0, 5)
