"""The limits of `verify` in half precision, from three recordings whose distances are known."""

import pytest
import torch

from memtrain.trainers.tools.verify.compare import StepDifferences, differences, moves_of
from memtrain.trainers.tools.verify.record import Recorded


def recorded(error: float) -> Recorded:
    """A step whose one gradient is `error` of its norm away from (3, 4)."""
    gradient = torch.tensor([3.0, 4.0]) + torch.tensor([5 * error, 0.0])
    weights = {"w": torch.zeros(2)}
    return Recorded(
        1.0, torch.zeros(2), {"w": gradient}, weights, rate=0.5, num_micro_batches=1, longest_answer=0
    )


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_that_stand_still_under_updates_above_a_rounding_step_are_seen(dtype: torch.dtype):
    """An optimizer that steps the last number of 17 alone, like torch's fused SGD on a CPU."""
    before = {"w": torch.ones(17, dtype=dtype), "norm": torch.ones(3, dtype=dtype)}
    wide = recorded(0.0)
    wide.weights = {"w": torch.full((17,), 0.9), "norm": torch.full((3,), 1.0 - 2.0**-12)}
    mine = recorded(0.0)
    mine.weights = {"w": before["w"].clone(), "norm": before["norm"].clone()}
    mine.weights["w"][16] = 0.9
    found = moves_of(mine, before, wide)
    assert (found.num_due, found.num_still, found.where) == (17, 16, "w")
    assert not found.is_fine
    mine.weights["w"] = wide.weights["w"].to(dtype)
    assert moves_of(mine, before, wide).is_fine


def test_a_float32_step_that_moves_nothing_is_seen():
    before = {"w": torch.zeros(2)}
    found = moves_of(recorded(0.0), before, None)
    assert (found.num_due, found.num_still) == (2, 2)
    assert not found.is_fine
    moved = recorded(0.0)
    moved.weights = {"w": torch.tensor([1.0, 0.0])}
    assert moves_of(moved, before, None).is_fine


def test_a_gradient_that_is_no_number_is_never_within():
    assert not compared(float("nan")).gradients.is_within
