"""Counts of rows: what is kept of a batch, of a store, of too many rows, and of a reading that is stopped."""

import signal
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memtrain.trainers.data.length_report.counts import Counting, alike_answers, row_hashes
from memtrain.trainers.data.length_report.interrupt import on_interrupt
from memtrain.trainers.data.length_report.reader import one_thread_a_batch, reservoir, tokenizer_threads
from memtrain.trainers.data.length_report.split import counted, spread_out
from memtrain.trainers.data.store.token_store import TokenRow, as_rows


def rows(*ids: list[int], line: int = 1) -> list[TokenRow]:
    return [
        TokenRow(np.array(own, np.int32), (1, len(own) - 1), ((1, len(own)),), 0, line + number)
        for number, own in enumerate(ids)
    ]


def test_numbers_of_rows_are_those_of_their_tokens():
    counting = Counting(("prompt", "completion"), (0,))
    counting.add(as_rows(rows([5, 6, 7], [5, 6, 7, 8]), 2))
    counting.add(as_rows(rows([5, 6, 7], line=3), 2))
    counts = counting.done()
    assert counts.lengths.tolist() == [3, 4, 3]
    assert counts.part_tokens_RP.tolist() == [[1, 2], [1, 3], [1, 2]]
    assert (counts.num_seen, counts.tokens_seen, counts.loss_tokens_seen) == (3, 10, 7)
    assert counts.hashes_R[0] == counts.hashes_R[2] != counts.hashes_R[1]
    assert counts.longest == ((4, 0, 2), (3, 0, 1), (3, 0, 3))
    assert (counts.spans.ptr.tolist(), counts.spans.ends.tolist()) == ([0, 1, 2, 3], [3, 4, 3])


def test_nothing_counted_is_no_rows():
    assert Counting(("text",), (0,)).done().num_rows == 0


def test_too_many_rows_are_thinned_and_duplicates_stay_together():
    """10,000 rows, each twice, of which at most 3,000 are kept: of every kept one both."""
    counting = Counting(("prompt", "completion"), (0,), most_rows=3_000)
    for begin in range(0, 10_000, 500):
        some = [[1, number, number // 7] for number in range(begin, begin + 500)]
        counting.add(as_rows(rows(*some, *some), 2))
    counts = counting.done()
    assert counts.is_thinned
    assert counts.num_seen == 20_000
    assert 1_000 < counts.num_rows <= 3_000
    assert set(np.unique(counts.hashes_R, return_counts=True)[1].tolist()) == {2}
    assert len(counts.spans_S2) == counts.num_rows


def test_rows_of_a_source_are_those_of_its_streams():
    counting = Counting(("prompt", "completion"), (0, 1, 1))
    batch = as_rows(rows([1, 2], [1, 2, 3], [4, 5]), 2)
    batch.origin[:, 0] = [2, 0, 1]
    counting.add(batch)
    counts = counting.done()
    assert (counts.rows_of_source(0).tolist(), counts.rows_of_source(1).tolist()) == ([1], [0, 2])


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.tuples(*[st.lists(st.integers(0, 1), min_size=low, max_size=6) for low in (0, 1, 1)]),
        min_size=1,
        max_size=8,
    )
)
def test_answers_are_alike_up_to_their_first_difference(pairs: list[tuple[list[int], ...]]):
    ids = np.array([token for pair in pairs for part in pair for token in part], np.int32)
    parts = np.array([[len(part) for part in pair] for pair in pairs], np.int64)

    def slow(first: list[int], second: list[int]) -> int:
        both = list(zip(first, second, strict=False))
        return next((at for at, (one, other) in enumerate(both) if one != other), len(both))

    assert alike_answers(ids, parts).tolist() == [slow(pair[1], pair[2]) for pair in pairs]


def test_hashes_tell_rows_apart_by_all_their_tokens():
    ids = np.array([1, 2, 1, 2, 1, 2, 3], np.int32)
    first, second, third = row_hashes(ids, np.array([2, 2, 3])).tolist()
    assert first == second != third


def test_every_row_is_drawn_as_often_as_any_other():
    """3 of 10 rows, 4,000 times: each some 1,200 times, within five standard deviations (5 x 29)."""
    random = np.random.default_rng(0)
    drawn = np.zeros(10)
    for _ in range(4_000):
        chosen, count = reservoir(iter(range(10)), 3, random)
        assert count == 10
        assert chosen == sorted(set(chosen))
        drawn[chosen] += 1
    assert np.abs(drawn - 1_200).max() < 145


def test_a_sample_of_more_than_there_is_is_all():
    assert reservoir(iter("abc"), 5, np.random.default_rng(0)) == (["a", "b", "c"], 3)


def test_counts_by_value_give_the_values_back():
    counts = counted(counted(np.zeros(1, np.int64), np.array([3, 1, 3])), np.array([0, 5]))
    assert spread_out(counts).tolist() == [0, 1, 3, 3, 5]


@pytest.fixture
def heeds_ctrl_c() -> Iterator[None]:
    """Python's own handler: a process that a background job has started ignores Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heeds_ctrl_c")
def test_ctrl_c_ends_the_rows_and_a_second_one_the_program():
    with on_interrupt() as stop:
        taken = []
        for number in stop.until(iter(range(10))):
            taken.append(number)
            if number == 3:
                signal.raise_signal(signal.SIGINT)
        assert taken == [0, 1, 2, 3]
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize(
    ("parallelism", "rayon", "expected"),
    [("false", None, 1), ("0", "3", 1), ("true", "3", 3), (None, "5", 5)],
)
def test_rows_are_tokenized_on_as_many_threads_as_the_tokenizer_would_take(
    parallelism: str | None, rayon: str | None, expected: int, monkeypatch: pytest.MonkeyPatch
):
    for name, value in (("TOKENIZERS_PARALLELISM", parallelism), ("RAYON_NUM_THREADS", rayon)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    assert tokenizer_threads() == expected
    with one_thread_a_batch():
        assert tokenizer_threads() == 1
    assert tokenizer_threads() == expected
