"""Metrics of the load of experts, from counts of the whole step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from memtrain.trainers.build.expert_load import CountsExperts


def test_the_fullest_and_the_idle_experts_by_hand():
    """Two layers of four experts: 6 of a mean of 2 and 2 of 2; three of eight got nothing."""
    inner: Any = SimpleNamespace()
    counted = CountsExperts(inner, counts=SimpleNamespace(), num_layers=2)  # type: ignore[arg-type]
    sent = [6, 2, 0, 0, 2, 2, 4, 0]
    sums = {f"expert_tokens/{number}": float(count) for number, count in enumerate(sent)}
    made = counted.means({"entropy": 3.0, **sums}, 2.0)
    assert made == {
        "entropy": 1.5,
        "expert_load_max": pytest.approx((6 / 2 + 4 / 2) / 2),
        "experts_idle": pytest.approx(3 / 8),
    }
    (event,) = counted.events(7)
    assert (event.step, event.steps, event.tokens) == (7, 1, ((6, 2, 0, 0), (2, 2, 4, 0)))
    assert counted.events(8) == []


def test_held_out_rows_are_told_and_not_added_to_the_steps():
    inner: Any = SimpleNamespace()
    counted = CountsExperts(inner, counts=SimpleNamespace(), num_layers=1)  # type: ignore[arg-type]
    sums = {f"held_out_expert_tokens/{number}": value for number, value in enumerate((3.0, 1.0))}
    assert counted.means(sums, 1.0) == {"expert_load_max": 1.5, "experts_idle": 0.0}
    assert counted.events(1) == []
