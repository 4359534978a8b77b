import numpy as np
import torch

from memtrain.trainers.batches.collate import Piece, lay_end_to_end, nothing, pad_right


def piece(ids: list[int], loss_tokens: list[int]) -> Piece:
    return Piece(np.array(ids, np.int32), np.array(loss_tokens, np.bool_))


FIRST = piece([11, 12, 13], [0, 0, 1])
SECOND = piece([21, 22, 23, 24], [1, 1, 0, 1])


def test_rows_end_to_end_are_segments_and_their_first_tokens_are_never_predicted():
    """Learnt: 13 (predicted from row 1), 22 (from 3), 24 (from 5); 21 is first, so nothing predicts it."""
    made = lay_end_to_end([FIRST, SECOND], pad_id=0)
    assert made.input_ids.tolist() == [[11, 12, 13, 21, 22, 23, 24]]
    assert made.position_ids.tolist() == [[0, 1, 2, 0, 1, 2, 3]]
    assert made.layout is not None
    assert made.layout.within.query_bounds == (0, 3, 7)
    assert made.scored_index.tolist() == [1, 3, 5]
    assert made.targets.tolist() == [13, 22, 24]
    assert (made.num_tokens, made.num_loss_tokens) == (7, 3)


def test_padding_to_a_multiple_is_a_segment_of_its_own():
    made = lay_end_to_end([FIRST, SECOND], pad_id=9, multiple=8)
    assert made.input_ids.tolist() == [[11, 12, 13, 21, 22, 23, 24, 9]]
    assert made.layout is not None
    assert made.layout.within.query_bounds == (0, 3, 7, 8)
    assert made.num_tokens == 7


def test_padded_rows_predict_the_same_tokens():
    """Flattened [2, 4]: 13 is predicted from index 1, 22 from 4, 24 from 6."""
    made = pad_right([FIRST, SECOND], pad_id=9)
    assert made.input_ids.tolist() == [[11, 12, 13, 9], [21, 22, 23, 24]]
    assert made.layout is None
    assert made.scored_index.tolist() == [1, 4, 6]
    assert made.targets.tolist() == [13, 22, 24]
    assert pad_right([FIRST], pad_id=9, multiple=4).input_ids.shape == (1, 4)


def test_a_micro_batch_of_nothing_scores_nothing():
    for is_flat in (True, False):
        made = nothing(pad_id=3, is_flat=is_flat)
        assert (made.num_tokens, made.num_loss_tokens) == (0, 0)
        assert made.input_ids.dtype == torch.int64


def test_a_micro_batch_of_nothing_can_be_cut_too():
    """A group of ranks that has no rows left holds it together, a slice each."""
    for is_flat in (True, False):
        made = nothing(pad_id=3, is_flat=is_flat, multiple=8)
        assert made.input_ids.shape == (1, 8)
        assert made.num_tokens == 0
