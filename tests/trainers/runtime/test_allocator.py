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
    settings: Any = SimpleNamespace(
        threads=1,
        device="cuda",
        expandable_segments=is_on,
        num_processes=1,
        deterministic=False,
        step_graphs=False,
    )
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
    cuda = Cuda(is_there)
    cuda.take_over(monkeypatch)
    assert words in allocator.allocator_words(is_asked)


def test_cached_segments_of_before_tell_nothing_of_todays_settings(monkeypatch: pytest.MonkeyPatch):
    """A stage before had fixed ones: one is only cached, one has room beside a tensor that is alive."""
    cuda = Cuda(is_expandable=True)
    cuda.add(size=4 * allocator.PROBE_BYTES, is_expandable=False)
    cuda.add(size=4 * allocator.PROBE_BYTES, is_expandable=False, used=allocator.PROBE_BYTES)
    cuda.take_over(monkeypatch)
    assert allocator.expandable_in_force()
    assert len(cuda.segments) == 2, "What was cached is given back, and one is new."


class Cuda:
    """An allocator that serves a block from the rest of a segment, else from a new one."""

    def __init__(self, is_expandable: bool) -> None:
        self.is_expandable = is_expandable
        self.segments: list[dict[str, Any]] = []

    def add(self, size: int, is_expandable: bool, used: int = 0) -> dict[str, Any]:
        start = max((one["address"] + one["total_size"] for one in self.segments), default=2**40)
        made = {"address": start, "total_size": size, "is_expandable": is_expandable, "allocated_size": used}
        self.segments.append(made)
        return made

    def empty(self, size: int, **_: object) -> SimpleNamespace:
        rest = (one for one in self.segments if one["total_size"] - one["allocated_size"] >= size)
        segment = next(rest, None) or self.add(size, self.is_expandable)
        place = segment["address"] + segment["allocated_size"]
        segment["allocated_size"] += size
        return SimpleNamespace(data_ptr=lambda: place)

    def empty_cache(self) -> None:
        self.segments = [one for one in self.segments if one["allocated_size"]]

    def take_over(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch, "empty", self.empty)
        monkeypatch.setattr(torch.cuda, "empty_cache", self.empty_cache)
        monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: [dict(one) for one in self.segments])


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
