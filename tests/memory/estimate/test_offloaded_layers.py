"""Storages that the planner counts one by one are those that the mover of activations leaves there."""

from memtrain.memory.estimate.offloaded_layers import KEPT_STORAGES, LEAST_BYTES
from memtrain.trainers.model.offload import activations, offloader


def test_storages_that_stay_are_those_of_the_mover():
    assert (activations.KEEP_LAST["all"], offloader.MIN_BYTES) == (KEPT_STORAGES, LEAST_BYTES)
