"""Settings of CUDA's allocator, with the call that gives them replaced."""

from __future__ import annotations

import pytest
import torch

from memtrain.trainers.runtime import allocator


@pytest.mark.parametrize("is_on", [False, True])
def test_fixed_segments_give_back_what_the_plan_asked_for(is_on: bool, monkeypatch: pytest.MonkeyPatch):
    given: list[str] = []
    for name in allocator.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", given.append)
    monkeypatch.setattr(allocator, "_asked", True)
    allocator.use_expandable_segments(is_on)
    with allocator.fixed_segments():
        assert given[-1] == "expandable_segments:False"
    assert given[-1] == given[0] == f"expandable_segments:{is_on}"
