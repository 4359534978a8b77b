"""A rollout in a checkpoint: the same after it, and read from checkpoints of earlier versions."""

import numpy as np

from memtrain.trainers.online.generation.protocol import Sample
from memtrain.trainers.online.rollout.rollout_batches import Rollout, new_window, window_of


def rollout() -> Rollout:
    made = new_window(3, [7], [0], [[1, 2]], [[Sample((5, 6), (-1.0, -2.0), "stop")]], 1)
    made.metrics = {"reward": 0.5}
    return made


def test_a_rollout_is_the_same_after_its_state():
    found = window_of(rollout().state())
    assert (found.number, found.metrics) == (3, {"reward": 0.5})
    assert np.array_equal(found.ids_N, [5, 6])
