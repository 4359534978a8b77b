"""Measurements of `memtrain calibrate`."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from memtrain.trainers.tools import calibrate


def test_products_are_timed_on_random_numbers(monkeypatch: pytest.MonkeyPatch):
    """A GPU multiplies ones at a higher clock than any training has: 894 TFLOP/s in place of 788."""
    made: list[Tensor] = []

    def timed(work: Callable[[], Tensor], wait: object = None) -> float:
        made.append(work())
        return 2.0

    monkeypatch.setattr(calibrate, "seconds_of", timed)
    assert calibrate.products_a_second(64, torch.float32, "cpu") == 64**3
    assert len(made[0].unique()) > 4000
