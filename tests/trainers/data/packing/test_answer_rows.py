"""Truncation and grouping of prompts with answers: what is kept, what is lost, and that it is counted."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memtrain.recipes.sections.length import Length, RowLimits, limits_of
from memtrain.trainers.data.packing.answer_rows import lay_out_answers, truncated
from memtrain.trainers.data.store.token_store import StoreWriter, TokenRow, TokenStore, as_rows

Pair = tuple[list[int], list[int], list[int]]


def store_of(folder: Path, pairs: list[Pair]) -> TokenStore:
    """A store of [prompt][chosen][rejected] rows, the answers trained on."""
    folder.mkdir()
    rows = []
    for line, (prompt, chosen, rejected) in enumerate(pairs):
        ids = np.array(prompt + chosen + rejected, np.int32)
        seen = 0 if prompt else 1
        ends = (len(prompt) + len(chosen), len(ids))
        spans = ((len(prompt) + seen, ends[0]), (ends[0] + seen, ends[1]))
        rows.append(TokenRow(ids, (len(prompt), len(chosen), len(rejected)), spans, 0, line))
    writer = StoreWriter(folder, num_parts=3, has_label=True, has_columns=False)
    writer.add(as_rows(rows, 3))
    made: dict[str, Any] = {"format": "preference", "parts": ("prompt", "chosen", "rejected")}
    writer.finish(
        **made,
        streams=("x",),
        sources=(0,),
        num_read=1,
        num_skipped=0,
        skipped=(),
        num_empty=0,
        first_empty=None,
        unrendered={},
        made_of={},
    )
    return TokenStore.open(folder)


def pairs_by(**limits: Any) -> RowLimits:
    return limits_of(Length(**limits), has_prompts=True)


def kept_of(limits: dict[str, Any], prompt: int, *answers: int) -> tuple[int, int, list[int], bool]:
    """(prompt start, prompt, answers, fits) of one row."""
    kept = truncated(np.array([prompt]), np.array([answers]), pairs_by(**limits))
    return (
        int(kept.prompt_start[0]),
        int(kept.prompt[0]),
        kept.answer[0].tolist(),
        bool(kept.fits[0]),
    )


@pytest.mark.parametrize(
    ("limits", "row", "expected"),
    [
        ({"max_length": 10}, (5, 5, 3), (0, 5, [5, 3], True)),
        # The prompt gives way, from its beginning; both answers stay whole.
        ({"max_length": 10}, (8, 5, 3), (3, 5, [5, 3], True)),
        # An answer that is too long by itself leaves one token of the prompt and loses its end.
        ({"max_length": 10}, (8, 12, 3), (7, 1, [9, 3], True)),
        ({"max_length": 10, "truncation": "keep_start"}, (8, 5, 3), (0, 8, [2, 2], True)),
        ({"max_length": 10, "truncation": "keep_start"}, (10, 5, 3), (0, 10, [0, 0], False)),
        ({"max_length": 10, "truncation": "drop"}, (8, 5, 2), (0, 8, [5, 2], False)),
        ({"max_length": None, "max_prompt": 4}, (8, 5, 2), (4, 4, [5, 2], True)),
        ({"max_length": None, "max_prompt": 4, "truncation": "keep_start"}, (8, 5, 2), (0, 4, [5, 2], True)),
        ({"max_length": 10, "max_completion": 3}, (8, 5, 2), (1, 7, [3, 2], True)),
    ],
)
def test_a_prompt_gives_way_before_its_answers(
    limits: dict[str, Any], row: tuple[int, ...], expected: object
):
    assert kept_of(limits, *row) == expected


@given(
    st.integers(0, 30),
    st.lists(st.integers(1, 30), min_size=2, max_size=2),
    st.integers(2, 40),
    st.sampled_from(["keep_start", "keep_end", "drop"]),
)
@settings(max_examples=50, deadline=None)
def test_nothing_that_is_kept_is_over_the_limit(prompt: int, answers: list[int], limit: int, how: str):
    _, kept, cut, fits = kept_of({"max_length": limit, "truncation": how}, prompt, *answers)
    if fits:
        assert kept + max(cut) <= limit
        assert min(cut) >= 1


def test_loss_tokens_are_counted_for_each_answer(tmp_path: Path):
    """The second answer loses 4 of 9 loss tokens, the first none; without a prompt the first token is
    none."""
    store = store_of(tmp_path / "s", [([1, 2], [3, 4], list(range(10, 19))), ([], [5, 6], [7, 8, 9])])
    laid = lay_out_answers(store, np.arange(2), pairs_by(max_length=6), is_shared=True)
    assert laid.loss_tokens.tolist() == [[2, 5], [1, 2]]
    assert laid.profile.report.loss_tokens_cut_by_answer == (0, 4)
    assert laid.tokens.tolist() == [1 + 2 + 5, 2 + 3]
    assert laid.profile.most_segments(2, None) == 6, "A shared prompt is kept apart from its two answers."
    apart = lay_out_answers(store, np.arange(2), pairs_by(max_length=6), is_shared=False)
    assert apart.tokens.tolist() == [2 * 1 + 2 + 5, 2 + 3]
    assert apart.profile.most_segments(2, None) == 4


def test_answers_attend_to_their_prompt_which_attends_to_itself_once(tmp_path: Path):
    """A prompt of 2, read by 3 + 1 tokens in one pair and 1 + 1 in another: rows of 5, 3, 3 and 3; each
    without the prompt's square of 4 where it is shared, which is there once."""
    store = store_of(tmp_path / "s", [([1, 2], [3, 4, 5], [6]), ([1, 2], [7], [8])])
    length = pairs_by(group_prompts=True)
    shared, apart = (
        lay_out_answers(store, np.arange(2), length, is_shared=it).profile for it in (True, False)
    )
    assert shared.attended_tokens == (52 - 4 * 4 + 4) / 8
    assert apart.attended_tokens == 52 / 14


def test_a_pair_never_loses_one_side(tmp_path: Path):
    """One token of each answer is left: of a pair without a prompt, nothing is trained on then."""
    store = store_of(tmp_path / "s", [([1, 2], [3, 4], [5]), ([], [5, 6], [7, 8])])
    length = pairs_by(max_length=None, max_completion=1)
    laid = lay_out_answers(store, np.arange(2), length, is_shared=True)
    assert laid.row.tolist() == [0]
    assert laid.profile.report.rows_dropped == 1
    assert laid.profile.report.loss_tokens_dropped == 2


def test_a_pair_that_is_cut_to_two_equal_answers_is_left_out(tmp_path: Path):
    pairs: list[Pair] = [([1], [2, 3, 4], [2, 3, 5]), ([1], [2, 3, 4], [2, 4, 4])]
    store = store_of(tmp_path / "s", pairs)
    laid = lay_out_answers(store, np.arange(2), pairs_by(max_length=None, max_completion=2), is_shared=True)
    assert laid.row.tolist() == [1]
    assert laid.profile.report.rows_dropped == 1


def test_rows_of_one_prompt_are_one_sequence_up_to_a_bound(tmp_path: Path):
    pairs: list[Pair] = [([1, 2], [3 + n], [4 + n]) for n in range(9)] + [([7], [8], [9])]
    store = store_of(tmp_path / "s", pairs)
    length = pairs_by(group_prompts=True)
    laid = lay_out_answers(store, np.array([9, *range(9)]), length, is_shared=True)
    assert laid.weights.tolist() == [1, 8, 1]
    assert laid.tokens.tolist() == [3, 2 + 16, 4]
    assert sorted(laid.row.tolist()) == list(range(10))
