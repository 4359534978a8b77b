"""Settings of CUDA's allocator, with the call that gives them replaced."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from memtrain.errors import LaunchError
from memtrain.memory.hardware.devices import Hardware
from memtrain.trainers.build import components, engine
from memtrain.trainers.runtime import allocator
from memtrain.trainers.tools import doctor


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Settings that a CUDA allocator was given in this process; the environment has none."""
    found: list[str] = []
    for name in allocator.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", found.append)
    monkeypatch.setattr(allocator, "_asked", True)
    return found


@pytest.mark.parametrize("is_on", [False, True])
def test_fixed_segments_give_back_what_the_plan_asked_for(is_on: bool, given: list[str]):
    allocator.use_expandable_segments(is_on)
    with allocator.fixed_segments():
        assert given[-1] == "expandable_segments:False"
    assert given[-1] == given[0] == f"expandable_segments:{is_on}"


@pytest.mark.parametrize("is_on", [False, True])
def test_every_process_of_a_plan_asks_for_its_segments_itself(
    is_on: bool, given: list[str], monkeypatch: pytest.MonkeyPatch
):
    """Benchmarks, verifications and trials start without the launcher's environment."""
    monkeypatch.setattr(engine, "Accelerator", lambda **_: SimpleNamespace(num_processes=1))
    settings: Any = SimpleNamespace(threads=1, device="cuda", expandable_segments=is_on, num_processes=1)
    engine.make_accelerator(settings)
    assert given == [f"expandable_segments:{is_on}"]


@pytest.mark.parametrize(
    ("is_there", "is_asked", "words"),
    [
        (True, True, "has expandable segments, as planned"),
        (False, False, "has fixed segments, as planned"),
        (
            False,
            True,
            "has fixed segments where the plan has others: reserved memory is not the predicted one",
        ),
    ],
)
def test_the_report_tells_which_segments_were_seen(
    is_there: bool, is_asked: bool, words: str, monkeypatch: pytest.MonkeyPatch
):
    """Seen: of the segment in which a block that is allocated now lies."""
    block = SimpleNamespace(data_ptr=lambda: 4096)
    monkeypatch.setattr(torch, "empty", lambda *size, **more: block)
    others = {"address": 0, "total_size": 4096, "is_expandable": not is_there}
    own = {"address": 4096, "total_size": 4096, "is_expandable": is_there}
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: [others, own])
    assert words in allocator.allocator_words(is_asked)


def test_doctor_asks_for_expandable_segments_and_tells_what_it_saw(
    given: list[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2**30, 2**31))
    monkeypatch.setattr(doctor, "expandable_in_force", lambda: False)
    found = doctor._device(Hardware.named("h100"))
    assert given == ["expandable_segments:True"]
    assert found.words.endswith("no expandable segments")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_gpu_that_adds_half_products_in_half_is_refused(dtype: str, monkeypatch: pytest.MonkeyPatch):
    """The chunked head and its plan hold no float32 copies, for the kernel is taken to add in float32."""
    has = {getattr(torch, dtype): True}
    monkeypatch.setattr(components, "local_device", lambda settings: torch.device("cuda"))
    monkeypatch.setattr(components, "sums_half_in_fp32", lambda device, asked: has.get(asked, False))
    settings: Any = SimpleNamespace(device="cuda", dtype=dtype)
    components._verify_sums(settings)
    has.clear()
    with pytest.raises(LaunchError, match=f"does not accumulate {dtype} matrix products in float32"):
        components._verify_sums(settings)
    settings.dtype = "float32"
    components._verify_sums(settings)
