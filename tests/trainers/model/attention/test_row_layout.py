"""Layouts: boundaries, positions and what predicts what, against rows written out by hand."""

import pytest
import torch

from memtrain.trainers.model.attention.row_layout import packed_layout, shared_layout


def test_a_packed_row_restarts_its_positions_at_every_segment():
    layout = packed_layout([3, 1, 2])
    assert layout.position_ids.tolist() == [[0, 1, 2, 0, 0, 1]]
    assert layout.within.query_bounds == layout.within.key_bounds == (0, 3, 4, 6)
    assert layout.within.cu_query.tolist() == [0, 3, 4, 6]
    assert layout.within.cu_query.dtype == torch.int32
    assert (layout.within.max_query, layout.within.max_key, layout.longest_span) == (3, 3, 3)
    assert layout.to_prompt is None
    assert layout.num_tokens == 6


def test_a_packed_token_is_predicted_by_its_neighbour_and_a_first_token_by_none():
    layout = packed_layout([3, 1, 2])
    assert layout.predicting_rows.tolist() == [0, 1, 4]
    assert layout.predicted_rows.tolist() == [1, 2, 5]


def test_a_shared_row_puts_prompts_first_and_positions_continue():
    """Prompts of 2 and 3 tokens; completions of 1 and 2 for the first, of 2 for the second.

    Row: p0 p0 | q0 q1 q2 | a | b b | c c; the prompts fill rows 0..4, the completions rows 5..9.
    """
    layout = shared_layout([(2, [1, 2]), (3, [2])])
    assert layout.position_ids.tolist() == [[0, 1, 0, 1, 2, 2, 2, 3, 3, 4]]
    assert layout.within.query_bounds == (0, 2, 5, 6, 8, 10)
    assert layout.num_prompt_tokens == 5
    assert layout.to_prompt is not None
    assert layout.to_prompt.query_bounds == (0, 3, 5)
    assert layout.to_prompt.key_bounds == (0, 2, 5)
    assert (layout.to_prompt.max_query, layout.to_prompt.max_key) == (3, 3)
    assert layout.longest_span == 5


def test_the_first_token_of_a_completion_is_predicted_by_its_prompts_last():
    layout = shared_layout([(2, [1, 2]), (3, [2])])
    assert layout.predicted_rows.tolist() == [5, 6, 7, 8, 9]
    assert layout.predicting_rows.tolist() == [1, 1, 6, 4, 8]


@pytest.mark.parametrize("lengths", [[], [3, 0, 2]])
def test_an_empty_segment_is_refused(lengths: list[int]):
    with pytest.raises(AssertionError, match="segment"):
        packed_layout(lengths)


def test_an_empty_prompt_is_refused_because_nothing_would_predict_the_first_token():
    with pytest.raises(AssertionError, match="shared prompt must hold a token"):
        shared_layout([(0, [3])])


@pytest.mark.parametrize("groups", [[], [(3, [])], [(3, [2, 0])]])
def test_a_group_without_completions_or_with_an_empty_one_is_refused(groups: list[tuple[int, list[int]]]):
    with pytest.raises(AssertionError, match=r"group|completion"):
        shared_layout(groups)


@pytest.mark.parametrize("layout", [packed_layout([2, 3]), shared_layout([(2, [1, 2])])])
def test_a_layout_moves_with_all_its_tensors(layout):
    moved = layout.to("meta", non_blocking=True)
    assert moved.device.type == moved.within.cu_key.device.type == moved.predicting_rows.device.type == "meta"
    assert moved.to_prompt is None or moved.to_prompt.cu_query.device.type == "meta"
    assert moved.within.spans() == layout.within.spans()
