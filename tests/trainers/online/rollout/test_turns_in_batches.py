"""Answers of several turns in micro-batches: every token is read, and only the model's are scored."""

import numpy as np
import pytest

from memtrain.trainers.batches.answer_batch import Answer, Group, collate_answers
from memtrain.trainers.online.generation.protocol import Sample
from memtrain.trainers.online.rollout.dynamic_sampling import spare_rows
from memtrain.trainers.online.rollout.rollout_batches import new_window, window_of

OWN = (True, True, False, False, True)
TALK = Sample((7, 8, 9), (-0.1, -0.2, -0.3), "stop", (7, 8, 50, 51, 9), OWN, 2)
SHORT = Sample((6,), (-0.4,), "length", (6,), (True,), 1)


@pytest.mark.parametrize(("is_shared", "is_flat"), [(True, True), (False, True), (False, False)])
def test_targets_are_the_tokens_that_the_model_wrote(is_shared: bool, is_flat: bool):
    window = window_of(new_window(0, [3], [0], [(1, 2)], [[TALK, SHORT]], 1).state())
    assert window.ids_N.tolist() == [7, 8, 9, 6]
    assert (window.length_A.tolist(), window.context_length_A.tolist()) == ([3, 1], [5, 1])
    answers = tuple(Answer(*window.context(number)) for number in range(2))
    group = Group(window.prompt(0), answers)
    batch = collate_answers([group], [0.0, 0.0], None, is_shared=is_shared, is_flat=is_flat, pad_id=0)
    assert batch.micro_batch.targets.tolist() == window.ids_N.tolist()
    assert batch.lengths_A.tolist() == window.length_A.tolist()
    # What predicts a token of the model is the token before it: of the third, the environment's last.
    read = batch.micro_batch.input_ids.reshape(-1)[batch.micro_batch.scored_index]
    assert read.tolist() == [2, 7, 51, 2]


def test_a_rollout_of_single_turns_has_no_second_copy_of_its_tokens():
    window = new_window(0, [3], [0], [(1, 2)], [[Sample((4, 5), (0.0, 0.0), "stop")]], 1)
    assert window.context_ids is None
    assert window.context(0)[0].tolist() == [4, 5]
    assert window.context(0)[1].all()


def test_spare_prompts_are_those_that_were_not_drawn():
    assert spare_rows(np.array([4, 1, 3, 0, 2]), {1, 4}, 2) == [3, 0]
    assert spare_rows(np.array([4, 1, 3, 0, 2]), {0, 1, 3, 4}, 2) == [2]
