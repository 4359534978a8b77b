"""The limits of `verify` in half precision, from three recordings whose distances are known."""

import pytest
import torch

from memtrain.trainers.tools.verify.compare import StepDifferences, differences
from memtrain.trainers.tools.verify.record import Recorded


def recorded(error: float) -> Recorded:
    """A step whose one gradient is `error` of its norm away from (3, 4)."""
    gradient = torch.tensor([3.0, 4.0]) + torch.tensor([5 * error, 0.0])
    weights = {"w": torch.zeros(2)}
    return Recorded(1.0, torch.zeros(2), {"w": gradient}, weights, num_micro_batches=1, longest_answer=0)


def compared(error: float) -> StepDifferences:
    """A planned side that is `error` away from float32, where the plain one is 0.01 away."""
    before = {"w": torch.zeros(2)}
    return differences(recorded(error), recorded(0.01), before, recorded(0.0))


def test_half_precision_is_held_against_the_plain_sides_distance():
    """A gradient may be twice as far from float32 as the plain side's, and 1e-4 beside."""
    found = compared(2 * 0.01).gradients
    assert found.limit == pytest.approx(2 * 0.01 + 1e-4, rel=1e-5)
    assert found.value == pytest.approx(2 * 0.01, rel=1e-5)
    assert found.is_within
    assert not compared(2 * 0.01 + 2e-4).gradients.is_within


def test_a_gradient_that_is_no_number_is_never_within():
    assert not compared(float("nan")).gradients.is_within
